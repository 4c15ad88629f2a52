"""Directories below a root, reached and removed name by name without following a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_formats.errors import StorageFailed

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """What tells a directory from every other one of this machine, by whatever path it is reached."""
    return status.st_dev, status.st_ino


def check_same(descriptor: int, at: tuple[int, int], root: Path) -> None:
    """`StorageFailed` where a root was moved and another directory put in its place: that is left alone."""
    if identity_of(os.fstat(descriptor)) != at:
        raise StorageFailed(
            f"{root} is no longer the same directory: it was moved or remounted",
            hint="put it back, or stop the daemon and start it on the right directory",
        )


@contextmanager
def absent() -> Iterator[None]:
    """Nothing at the place that is asked for is no error."""
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            raise


def open_directory(parent: int, name: str, make: bool) -> int:
    """A descriptor of the directory `name`, made if it is not there and `make` allows it."""
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another thread may have been faster
        os.mkdir(name, dir_fd=parent)
    return os.open(name, DIRECTORY, dir_fd=parent)


def remove_empty(parent: int, name: str) -> bool:
    """Remove a directory in which there is nothing; False where there is something, or where it is no directory."""
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def remove_tree(parent: int, name: str) -> None:
    """Remove what is at `name`; of a symbolic link only the link."""
    try:
        directory = os.open(name, DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=parent)
        return
    try:
        for entry in os.listdir(directory):
            with suppress(FileNotFoundError):
                remove_tree(directory, entry)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)
