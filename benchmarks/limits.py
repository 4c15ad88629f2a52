"""What this machine can do at best: a copy in memory, a write to the disk, a read from it. Run as a process of its own:

python -m benchmarks.limits DIRECTORY BYTES RANKS
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from .disk import drop_caches

BLOCK_BYTES = 8 * 2**20
WRITERS = (1, 2, 4)
READERS = (1, 4, 16)
COPIES = 3
ALIGNMENT = 4096


def measure(directory: Path, size: int, ranks: int) -> dict[str, float]:
    """Seconds for `size` bytes in all: the fastest of the ways that were tried, for each limit."""
    torch.set_num_threads(1)
    size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    source = _touched(size)
    np.frombuffer(source, np.uint64)[:] = np.random.Generator(np.random.SFC64()).integers(
        0, 2**64, size=size // 8, dtype=np.uint64
    )
    target = _touched(size)
    found = {"memcpy": _memcpy(source, target, ranks)}
    path = directory / "limits"
    try:
        found["write"] = min(_write(path, source, writers) for writers in WRITERS)
        if drop_caches():
            found["read_cold"] = min(_read(path, target, readers, os.O_DIRECT) for readers in READERS)
        _read(path, target, 1, 0)
        found["read_warm"] = min(_read(path, target, readers, 0) for readers in READERS)
    finally:
        path.unlink(missing_ok=True)
    return found


class Disk:
    """Writes so many bytes to a new file, again and again, as `measure` does with two writers."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._source = path, _touched(-(-size // BLOCK_BYTES) * BLOCK_BYTES)

    def write(self) -> float:
        """Seconds until they are durable."""
        try:
            return _write(self._path, self._source, 2)
        finally:
            self._path.unlink(missing_ok=True)


def _touched(size: int) -> mmap.mmap:
    """Shared memory, as between a trainer and a daemon, every page of it in place."""
    memory = mmap.mmap(-1, size)
    np.frombuffer(memory, np.uint8)[::ALIGNMENT] = 1
    return memory


def _memcpy(source: mmap.mmap, target: mmap.mmap, ranks: int) -> float:
    """One thread a rank, as trainers on a core each have, all at once; the median of a few."""
    here, there = (torch.frombuffer(memory, dtype=torch.uint8).chunk(ranks) for memory in (source, target))
    times = []
    with ThreadPoolExecutor(ranks) as pool:
        for _ in range(COPIES):
            began = time.perf_counter()
            list(pool.map(lambda part: there[part].copy_(here[part]), range(ranks)))
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _write(path: Path, source: mmap.mmap, writers: int) -> float:
    """O_DIRECT into a new, preallocated file, then fdatasync; buffered where the file system has no O_DIRECT."""
    path.unlink(missing_ok=True)
    os.sync()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, flags, 0o644)
    view = memoryview(source)
    try:
        began = time.perf_counter()
        os.posix_fallocate(descriptor, 0, len(source))
        _in_blocks(len(source), writers, lambda at: os.pwrite(descriptor, view[at : at + BLOCK_BYTES], at))
        os.fdatasync(descriptor)
        return time.perf_counter() - began
    finally:
        view.release()
        os.close(descriptor)


def _read(path: Path, target: mmap.mmap, readers: int, flags: int) -> float:
    """Into memory that is in place; with O_DIRECT past the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
    view = memoryview(target)
    try:
        began = time.perf_counter()
        _in_blocks(len(target), readers, lambda at: os.preadv(descriptor, [view[at : at + BLOCK_BYTES]], at))
        return time.perf_counter() - began
    finally:
        view.release()
        os.close(descriptor)


def _in_blocks(size: int, threads: int, act: Callable[[int], int]) -> None:
    def whole(at: int) -> None:
        done = act(at)
        if done != BLOCK_BYTES:
            raise OSError(f"{done} of {BLOCK_BYTES} bytes at {at}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(whole, range(0, size, BLOCK_BYTES)))


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
