"""One writer for a name: a lock file beside it, which the kernel releases with the process, and which goes with the work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_formats.errors import InUse

_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def alone(directory: int, leaf: str) -> Iterator[None]:
    """Keep other processes and threads that ask from writing `leaf` in the open `directory`; `InUse` while one does."""
    name = f".{leaf}.lock"
    descriptor = _taken(directory, name, leaf)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        os.close(descriptor)


def _taken(directory: int, name: str, leaf: str) -> int:
    while True:
        descriptor = os.open(name, _FILE, 0o600, dir_fd=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(directory, name, descriptor):  # else whoever had it has removed it meanwhile
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise InUse(
                f"another program is writing {leaf} at this moment", hint="wait until it ends, or choose another name"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_there(directory: int, name: str, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(descriptor))
    return False
