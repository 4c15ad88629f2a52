"""Exclusive names: for one process, or one thread of it, at a time. The kernel frees a name when its holder ends."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_formats.errors import InUse

FILE_MODE = 0o666  # minus the umask
HOLDER_BYTES_MAX = 256
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def held(directory: int, leaf: str, path: str) -> Iterator[None]:
    """Lock the file `leaf` in an open directory, which is made for it and removed at the end; `InUse` names the process that
    holds it. Raises OSError if files cannot be locked.
    """
    descriptor = _locked(directory, leaf, path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            # While it is locked: a process that has opened it meanwhile sees that it is gone.
            os.unlink(leaf, dir_fd=directory)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a child process has the descriptor too
        os.close(descriptor)


def _locked(directory: int, leaf: str, path: str) -> int:
    while True:
        descriptor = os.open(leaf, _LOCK_FILE, FILE_MODE, dir_fd=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands(directory, leaf, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, HOLDER_BYTES_MAX, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise InUse(
                f"{holder} is already writing there and holds {path}",
                hint="wait until it has ended, or choose another name",
                path=path,
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it between our opening and our locking it


def _stands(directory: int, leaf: str, descriptor: int) -> bool:
    try:
        status = os.stat(leaf, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))
