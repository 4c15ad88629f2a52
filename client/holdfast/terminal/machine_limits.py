"""Measurements of `holdfast bench`: the limits of this machine and what they mean for checkpoints.

The bytes are random, because disks and file systems may treat zeros better than real weights.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holdfast_formats.digest import digest
from holdfast_formats.errors import InvalidRequest, NoSpace, StorageFailed

BLOCK_BYTES = 8 * 2**20
EXTENT_BYTES = 2**20
RUNS = 3
WRITERS = 2
READERS = 8
# What this version reached of each limit in docs/benchmarks.md, medians of its runs.
STAGED_OF_COPY = 1 / 1.03
DURABLE_OF_WRITE = 0.92
RESTORE_OF_READ = 0.75
# Ends with its parent, also one that is killed.
_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**5): pass"


class Limits(NamedTuple):
    """Bytes per second; `direct` says whether the file system supports O_DIRECT writes. `busy`: digested and written while
    one process for each core computes without a pause.
    """

    copy: float
    digest: float
    write: float
    busy: float
    read: float
    direct: bool


class Expectation(NamedTuple):
    """Seconds that a save and a restore of `bytes` on this node should take; `busy_s`: until it is durable, if all cores
    compute.
    """

    bytes: int
    staged_s: float
    durable_s: float
    busy_s: float
    restore_s: float


def measure(directory: Path, size: int, on_step: Callable[[str], None] = lambda _: None) -> Limits:
    """Measure in `directory` with this many bytes, in whole blocks of 8 MiB; each figure is the median of three runs.

    Raises `InvalidRequest` for less than one block, and `NoSpace` or `StorageFailed` for the directory.
    """
    if size < BLOCK_BYTES:
        raise InvalidRequest(f"{size} bytes are too few for a measurement", hint=f"use at least {BLOCK_BYTES}")
    size -= size % BLOCK_BYTES
    on_step("preparing random bytes")
    source, target = _touched(size), _touched(size)
    np.frombuffer(source, np.uint64)[:] = np.random.Generator(np.random.SFC64()).integers(0, 2**64, size // 8, np.uint64)
    octets, target_octets = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    on_step("copying in memory")
    copied = _median(lambda: np.copyto(target_octets, octets))
    on_step("digesting")
    digested = _median(lambda: [digest(octets[at : at + EXTENT_BYTES]) for at in range(0, size, EXTENT_BYTES)])
    with _file(directory) as path:
        on_step("writing to the disk")
        direct = _has_direct(path)
        written = _median(lambda: _write(path, source, direct))
        on_step("writing while all cores compute")
        with _all_cores_busy():
            busy = _median(lambda: _write(path, source, direct, digested=True))
        on_step("reading from the disk")
        read = _median(lambda: _read(path, target, direct))
    return Limits(size / copied, size / digested, size / written, size / busy, size / read, direct)


def expect(limits: Limits, size: int) -> Expectation:
    """Estimate save and restore times of this many bytes on one node. A save digests while it writes: the slower limit
    counts.
    """
    durable = min(limits.write, limits.digest) * DURABLE_OF_WRITE
    restore = min(limits.read, limits.digest) * RESTORE_OF_READ
    busy = min(durable, limits.busy * DURABLE_OF_WRITE)
    return Expectation(size, size / (limits.copy * STAGED_OF_COPY), size / durable, size / busy, size / restore)


@contextmanager
def _all_cores_busy() -> Iterator[None]:
    """One process for each core that computes at this process's priority, as data loaders do."""
    computing: list[subprocess.Popen[bytes]] = []
    try:
        for _ in os.sched_getaffinity(0):
            computing.append(subprocess.Popen([sys.executable, "-S", "-c", _BURN]))
        yield
    finally:
        for process in computing:
            process.kill()
            process.wait()


def _touched(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


def _median(act: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return sorted(times)[RUNS // 2]


@contextmanager
def _file(directory: Path) -> Iterator[Path]:
    path = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".holdfast-bench-", dir=directory)
        os.close(descriptor)
        path = Path(name)
        yield path
    except OSError as error:
        hint = "pass another directory with --root, or fewer bytes with --size-mib"
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise NoSpace(f"{directory}: {error.strerror}", hint=hint) from error
        raise StorageFailed(f"{directory}: {error.strerror}", hint=hint) from error
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _has_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _write(path: Path, source: mmap.mmap, direct: bool, digested: bool = False) -> None:
    """Write as a save does: blocks into a preallocated file, with O_DIRECT if possible, two at a time, then fdatasync.
    `digested`: each after its digest.
    """
    view = memoryview(source)
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | (os.O_DIRECT if direct else 0))
    try:
        os.posix_fallocate(descriptor, 0, len(view))
        with ThreadPoolExecutor(WRITERS) as pool:
            for job in [pool.submit(_put, descriptor, view, at, digested) for at in range(0, len(view), BLOCK_BYTES)]:
                job.result()
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
        view.release()


def _put(descriptor: int, view: memoryview, at: int, digested: bool) -> None:
    stop = at + BLOCK_BYTES
    if digested:
        for extent in range(at, stop, EXTENT_BYTES):
            digest(view[extent : extent + EXTENT_BYTES])
    while at < stop:
        at += os.pwrite(descriptor, view[at:stop], at)


def _read(path: Path, target: mmap.mmap, direct: bool) -> None:
    """Read as a restore from a cold disk does; without O_DIRECT the file is dropped from the page cache first."""
    view = memoryview(target)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with ThreadPoolExecutor(READERS) as pool:
            for job in [pool.submit(_get, descriptor, view, at) for at in range(0, len(view), BLOCK_BYTES)]:
                job.result()
    finally:
        os.close(descriptor)
        view.release()


def _get(descriptor: int, view: memoryview, at: int) -> None:
    stop = at + BLOCK_BYTES
    while at < stop:
        got = os.preadv(descriptor, [view[at:stop]], at)
        if got == 0:
            return
        at += got
