"""Probes of `holdfast doctor`: the file system under the root, fsync, and the connection to the service."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError

FSYNCS = 16
FSYNC_WARN_S = 0.1
FSYNC_BYTES = 4096
ROUND_TRIPS = 5
ROUND_TRIP_WARN_S = 0.2
DESCRIPTORS_MIN = 1024
VOLATILE = ("tmpfs", "ramfs")
NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "fuse")


class Finding(NamedTuple):
    """The result of one check. `advice` says what to do; it is empty if there is nothing to do."""

    name: str
    status: Literal["ok", "warn", "fail"]
    what: str
    advice: str = ""


def file_system(place: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Finding:
    """Check the root's file system: whether it survives a reboot, and whether it is on a network."""
    kind = mounted_as(place.resolve(), mounts)
    if kind is None:
        return Finding(
            "file system", "warn", f"cannot find the file system of {place}", "make sure that it is durable storage"
        )
    if kind in VOLATILE:
        return Finding(
            "file system",
            "warn",
            f"{kind}: it is in memory",
            "use a root on a disk: this one is lost when the machine reboots",
        )
    if kind.partition(".")[0] in NETWORKED:
        advice = "make sure that it is mounted `hard`, syncs on close, and has atomic renames"
        return Finding("file system", "warn", f"{kind}, on a network", advice)
    return Finding("file system", "ok", kind)


def mounted_as(place: Path, mounts: Path) -> str | None:
    """The file system type at a path, from the kernel's mount list; None if unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if (place == point or point in place.parents) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), after.split()[0])
    return None if best is None else best[1]


def fsync(path: Path) -> Finding:
    """Time small durable writes: a commit needs about ten of them. The file exists and is kept."""
    times = []
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for _ in range(FSYNCS):
            os.pwrite(descriptor, os.urandom(FSYNC_BYTES), 0)
            began = time.perf_counter()
            os.fsync(descriptor)
            times.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    median, worst = statistics.median(times), max(times)
    what = f"median {median * 1000:.1f} ms, worst {worst * 1000:.1f} ms of {FSYNCS}"
    if median < FSYNC_WARN_S:
        return Finding("fsync", "ok", what)
    return Finding("fsync", "warn", what, "every commit needs about ten of these; training does not wait for them")


def direct_io(path: Path) -> Finding:
    """Check whether the file system supports O_DIRECT."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        advice = "saves go through the page cache, which is slower and uses memory for a while"
        return Finding("O_DIRECT", "warn", "not supported by this file system", advice)
    return Finding("O_DIRECT", "ok", "large files bypass the page cache")


def descriptors() -> Finding:
    """Check the limit of open files for this user's processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_MIN:
        return Finding("descriptors", "ok", what)
    return Finding("descriptors", "warn", what, f"raise it to {DESCRIPTORS_MIN} or more: ulimit -n {DESCRIPTORS_MIN}")


def service(api: Api, version: str) -> Iterator[Finding]:
    """Check the service: its version, the latency, and whether catalog and storage work."""
    times = []
    health = api.health()
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        api.health()
        times.append(time.perf_counter() - began)
    text = (
        "it answers; the version is shown only with a token"
        if health.version is None
        else f"version {health.version}{f', {health.root}' if health.root else ''}"
    )
    yield Finding("service", "ok", f"{api.url}: {text}")
    if health.version is not None and health.version.split(".")[:2] != version.split(".")[:2]:
        advice = "install the same minor version on both sides"
        yield Finding("versions", "warn", f"the service is {health.version}, this is {version}", advice)
    median = statistics.median(times)
    what = f"{median * 1000:.1f} ms per request"
    slow = "ranks that share no memory with the daemon save over this connection"
    yield Finding("network", "ok", what) if median < ROUND_TRIP_WARN_S else Finding("network", "warn", what, slow)
    try:
        api.request("GET", "/readyz")
        if health.status != "ok":
            waits = "; ".join(node.catalog for node in api.nodes() if node.catalog) or "it did not answer at the last check"
            yield Finding(
                "catalog", "warn", waits, "saves continue; check its database: the missing records are added when it answers"
            )
            return
        yield Finding("catalog", "ok", "catalog and storage answer")
        for node in api.nodes():
            if node.keeper is not None:
                yield Finding("staged saves", "ok", f"if the daemon of {node.name} is killed, {node.keeper} keeps them")
    except CheckpointError as error:
        yield Finding("catalog", "fail", error.detail, error.hint)
