"""Checks of `holdfast doctor`: everything that must be right before a trainer can save, with advice."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from holdfast import __version__
from holdfast.config import DEFAULT_ROOT, default_socket, default_url, given_url
from holdfast.memory import native_copy
from holdfast.read.checkpoint_index import PROBE_TIMEOUT_S
from holdfast.rest.api import Api
from holdfast.terminal import bucket_checks, holders, probes
from holdfast.terminal.console import human_bytes
from holdfast.terminal.options import NamedRoot
from holdfast.terminal.probes import Finding
from holdfast_files.objects import address
from holdfast_formats import memory_bounds
from holdfast_formats.errors import CheckpointError
from holdfast_formats.installing import install

PYTHON_MIN = (3, 10)
TORCH_MIN = (2, 6)
MEMORY_WARN_BYTES = 2 * 10**9
DISK_WARN_BYTES = 10 * 10**9
PROBE_BYTES = 4 * 2**20
PROBE_WARN_S = 1.0
CLOCK_SKEW_WARN_S = 5.0
CLOCK_MIN_S = 1_735_689_600  # 2025-01-01: a clock before it was never set


def examine(root: NamedRoot | None, url: str | None) -> list[Finding]:
    """Run all checks. A root or URL that the caller passed must exist; a default may be missing.

    Without `root`, the root of the daemon at this machine's default address is checked, else ./holdfast-data.
    """
    return [
        *_software(),
        *_memory(),
        probes.descriptors(),
        *_root(root or (_served_root() if url is None and given_url() is None else None)),
        _socket(default_socket()),
        *holders.found(default_socket().parent),
        *_service(url or default_url(), named=url is not None or given_url() is not None),
    ]


def _software() -> Iterator[Finding]:
    python = platform.python_version()
    if sys.version_info >= PYTHON_MIN:
        yield Finding("python", "ok", python)
    else:
        yield Finding("python", "fail", python, "use Python 3.10 or newer")
    yield Finding("holdfast", "ok", __version__)
    torch = _version("torch")
    if torch is None:
        yield Finding("torch", "warn", "not installed", "needed by trainers: pip install torch")
    elif _release(torch) < TORCH_MIN:
        yield Finding("torch", "fail", torch, "use torch 2.6 or newer")
    else:
        yield Finding("torch", "ok", torch)
    if native_copy.available():
        yield Finding("copies", "ok", "bypass the CPU caches")
    elif platform.machine() == "x86_64":
        advice = "copies are a third slower: reinstall holdfast-checkpoint with a C compiler (cc) available"
        yield Finding("copies", "warn", "go through the CPU caches, as with numpy", advice)
    if importlib.util.find_spec("fastapi") and importlib.util.find_spec("sqlalchemy"):
        yield Finding("daemon", "ok", "dependencies are installed")
    else:
        yield Finding(
            "daemon",
            "warn",
            "dependencies are missing",
            f"on the daemon's machine: {install('service')}",
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("holdfast-doctor"))
        yield Finding("memfd", "ok", "shared memory is available")
    except (AttributeError, OSError) as error:
        yield Finding("memfd", "fail", str(error), "the daemon needs Linux with memfd_create (not blocked by seccomp)")
    narrowest = min([memory_bounds.of_machine(), *memory_bounds.of_process()], key=lambda bound: bound.free)
    what = f"{human_bytes(max(narrowest.free, 0))} free of {human_bytes(narrowest.bytes_max)} ({narrowest.name})"
    advice = "the arena needs room for two saves of every rank of this node; give the machine or its container more memory"
    yield Finding("memory", "ok", what) if narrowest.free >= MEMORY_WARN_BYTES else Finding("memory", "warn", what, advice)
    if os.path.isdir("/dev/shm"):
        free = human_bytes(shutil.disk_usage("/dev/shm").free)
        yield Finding("/dev/shm", "ok", f"{free} free (not used by the arena, which uses memfd)")
    else:
        yield Finding("/dev/shm", "warn", "not mounted", "not needed by the arena, but data loaders may need it")


def _root(root: NamedRoot | None) -> Iterator[Finding]:
    if root is not None and root.bucket is not None:
        return bucket_checks.examine(root.bucket)
    return _storage(None if root is None else root.directory)


def _served_root() -> NamedRoot | None:
    try:
        with Api(default_url(), PROBE_TIMEOUT_S) as api:
            served = api.health().root
    except CheckpointError:
        return None  # reported below as what it is: no service
    if served and (address.is_address(served) or os.path.isdir(served)):
        return NamedRoot.parse(served)
    return None


def _storage(root: Path | None) -> Iterator[Finding]:
    place = root or DEFAULT_ROOT
    if not place.is_dir():
        if root is not None:
            yield Finding("root", "fail", f"{place} is not a directory", "create it, or pass another directory with --root")
        else:
            yield Finding(
                "root",
                "warn",
                f"./{place} does not exist",
                "start `holdfast serve`, which creates it, or pass another directory with --root",
            )
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("root", "fail", f"{place} is not writable", "give the daemon's user write permission")
        return
    yield Finding("root", "ok", f"{place} is writable")
    yield probes.file_system(place)
    usage = shutil.disk_usage(place)
    free = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free"
    advice = "a save needs free space for one more whole checkpoint"
    yield Finding("disk", "ok", free) if usage.free >= DISK_WARN_BYTES else Finding("disk", "warn", free, advice)
    yield from _probe(place)


def _probe(place: Path) -> Iterator[Finding]:
    descriptor, name = tempfile.mkstemp(prefix=".holdfast-doctor-", dir=place)
    os.close(descriptor)
    try:
        began = time.perf_counter()
        descriptor = os.open(name, os.O_WRONLY | os.O_DSYNC)  # a synchronous write, so that the disk is timed
        try:
            os.write(descriptor, bytes(PROBE_BYTES))
        finally:
            os.close(descriptor)
        took = time.perf_counter() - began
        skew = abs(os.stat(name).st_mtime - time.time())
        tried = [probes.direct_io(Path(name)), probes.fsync(Path(name))]
    except OSError as error:
        yield Finding("write", "fail", f"a durable write failed: {error.strerror}", "check the disk and its mount options")
        return
    finally:
        os.unlink(name)
    what = f"{human_bytes(PROBE_BYTES)} durable in {took * 1000:.0f} ms"
    slow = "slow storage delays commits, not training; make sure that saves do not come faster than it can write them"
    yield Finding("write", "ok", what) if took < PROBE_WARN_S else Finding("write", "warn", what, slow)
    yield from tried
    if time.time() < CLOCK_MIN_S:
        yield Finding("clock", "fail", time.strftime("%Y-%m-%d %H:%M:%S"), "set this machine's clock")
    elif skew > CLOCK_SKEW_WARN_S:
        yield Finding("clock", "warn", f"{skew:.0f} s off the storage's clock", "synchronise both clocks (NTP)")
    else:
        yield Finding("clock", "ok", "agrees with the storage's clock")


def _socket(path: Path) -> Finding:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PROBE_TIMEOUT_S)
            link.connect(str(path))
    except OSError as error:
        advice = "start the daemon with `holdfast serve`; a trainer without one starts its own"
        return Finding("socket", "warn", f"{path}: {error.strerror or error}", advice)
    return Finding("socket", "ok", f"a daemon is listening at {path}")


def _service(url: str, named: bool) -> Iterator[Finding]:
    try:
        with Api(url, PROBE_TIMEOUT_S) as api:
            yield from probes.service(api, __version__)
    except CheckpointError as error:
        yield Finding("service", "fail" if named else "warn", error.detail, error.hint)
