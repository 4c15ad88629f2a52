"""Unnamed files on the root's disk: their space is reserved as a whole, and freed with the last descriptor."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from holdfast_formats.errors import NoSpace, StorageFailed

from . import libc
from .translation import translated

PROBE_BYTES = 64 * 2**20
_PROBE_PIECE_BYTES = 4 * 2**20
_NAME = ".scratch"  # a fixed name, if files cannot be created without one: a crash leaves at most one, which is reused
_IN_MEMORY = (0x01021994, 0x858458F6)  # f_type of tmpfs and ramfs


def open_scratch(root: Path, size: int, beside: int) -> int:
    """A descriptor of a new file of `size` bytes below `root`, with every block reserved.

    Raises `NoSpace`, with the numbers, if the disk has no room for it and `beside` bytes more. Raises `StorageFailed` if the
    file system keeps its files in memory, or cannot reserve: then a write into mapped memory could fail for lack of a block.
    """
    with translated("create scratch file in", str(root)):
        if is_in_memory(root):
            raise StorageFailed(f"{root} is itself in memory", hint="spilling needs a root on a disk")
        free = _free(root)
        if free < size + beside:
            raise NoSpace(
                f"{root} has {free} bytes free; staging needs {size} there, and the checkpoint another {beside}",
                hint="free space on the disk, or memory on the machine",
            )
        descriptor = nameless(root)
        try:
            libc.fallocate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def free_bytes(root: Path) -> int:
    """The bytes that can still be reserved below `root`."""
    with translated("stat", str(root)):
        return _free(root)


def is_in_memory(at: Path | int) -> bool:
    """Whether the file system of a directory, or of a file that is open, keeps its files in memory, page by page."""
    return libc.file_system(at) in _IN_MEMORY


def is_scratch(descriptor: int) -> bool:
    """Whether this is an unnamed file without holes: no other process can open it, and writes to it need no new block."""
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_blocks * 512 >= status.st_size > 0


def write_speed(descriptor: int, size: int) -> float:
    """Bytes a second of the disk, from a short synced write; the written bytes are discarded."""
    length = min(size, PROBE_BYTES)
    piece = os.urandom(min(length, _PROBE_PIECE_BYTES))  # not zeros, which some disks do not write at all
    with translated("probe", "scratch"):
        began = time.monotonic()
        for offset in range(0, length, len(piece)):
            os.pwrite(descriptor, piece[: length - offset], offset)
            libc.start_writeback(descriptor, offset, len(piece))
        libc.await_writeback(descriptor, 0, length)
        took = time.monotonic() - began
    empty(descriptor, 0, length)
    return length / max(took, 1e-6)


def empty(descriptor: int, offset: int, length: int) -> None:
    """Drop the contents and keep the blocks: the next write need not read what it overwrites.

    If the file system cannot do that, the bytes stay, and the next write costs more.
    """
    with suppress(OSError):
        libc.zero_range(descriptor, offset, length)


def give_back(descriptor: int, offset: int, length: int) -> None:
    """Return the memory of a range of shared memory to the system, although processes have it mapped."""
    with translated("free", "shared memory"):
        libc.punch_hole(descriptor, offset, length)


def _free(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


def nameless(root: Path) -> int:
    """A descriptor of a new file in `root` that no other process can open."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(root, os.O_TMPFILE | flags, 0o600)
    path = root / _NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    path.unlink()
    return descriptor
