"""Calls of the C library that Python does not offer. All of them release the GIL and raise OSError."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of sync_file_range
_ZERO_RANGE_KEEP_SIZE, _PUNCH_HOLE_KEEP_SIZE = 0x10 | 0x01, 0x02 | 0x01  # of fallocate
_STATFS_BYTES_MAX = 256  # larger than struct statfs anywhere
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt
# Larger buffers are mapped and unmapped one by one, and each page of them faults in again. The blocks of a check are smaller
# (1 MiB, daemon/checking/statistics.py): mapped one by one they tripled its processor time.
_MAPPED_BYTES_MIN = 2 * 1024 * 1024
_KEPT_BYTES_MAX = 4 * 1024 * 1024  # free at the end of an arena
_ARENAS_MAX = 2
_libc = ctypes.CDLL(None, use_errno=True)


def renameat2(source_parent: int, source: str, target_parent: int, target: str) -> None:
    """Rename, and fail with EEXIST if the target exists."""
    _call("renameat2", source_parent, os.fsencode(source), target_parent, os.fsencode(target), _RENAME_NOREPLACE)


def exchange(source_parent: int, source: str, target_parent: int, target: str) -> None:
    """Exchange two names atomically."""
    _call("renameat2", source_parent, os.fsencode(source), target_parent, os.fsencode(target), _RENAME_EXCHANGE)


def fallocate(descriptor: int, size: int) -> None:
    """Reserve the file's blocks. Not os.posix_fallocate: without fallocate, the C library writes to every block instead."""
    _call("fallocate", descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size))


def zero_range(descriptor: int, offset: int, length: int) -> None:
    """Make a range read as zeros without writing it; its blocks stay reserved."""
    _call("fallocate", descriptor, _ZERO_RANGE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length))


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Return a range's memory or blocks to the system; it reads as zeros."""
    _call("fallocate", descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length))


def file_system(at: Path | int) -> int:
    """The number of the kind of file system at a path, or of an open file (f_type)."""
    string_buffer = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    if isinstance(at, int):
        _call("fstatfs", at, string_buffer)
    else:
        _call("statfs", os.fsencode(at), string_buffer)
    return int(
        ctypes.cast(string_buffer, ctypes.POINTER(ctypes.c_long))[0]
    )  # the first field, a word, on the machines we support


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel begin to write these dirty pages out."""
    _call("sync_file_range", descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _WRITE)


def await_writeback(descriptor: int, offset: int, length: int) -> None:
    """Wait until these pages are written out. This is not an fsync: neither metadata nor the device's cache is flushed."""
    flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
    _call("sync_file_range", descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), flags)


def give_memory_back() -> None:
    """From now on, return freed large buffers to the system at once, if malloc can be configured so.

    After the first large buffer that is freed, glibc's malloc keeps such buffers, in an arena for each of many threads: a
    daemon that once received eight chunks of megabytes kept 200 MiB for good.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:  # another C library, which behaves differently
        for option, value in (
            (_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN),
            (_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX),
            (_M_ARENA_MAX, _ARENAS_MAX),
        ):
            mallopt(option, value)


def _call(name: str, *arguments: object) -> None:
    function = getattr(_libc, name, None)
    code = errno.ENOSYS
    if function is not None:
        if function(*arguments) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))
