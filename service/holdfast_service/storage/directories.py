"""Directories below a root, opened and removed name by name without following a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_formats.errors import StorageFailed

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Identifies a directory among all directories of this machine, whatever path leads to it."""
    return status.st_dev, status.st_ino


def check_same(descriptor: int, at: tuple[int, int], root: Path) -> None:
    """Raise `StorageFailed` if a root was moved and another directory is in its place; that one is left alone."""
    if identity_of(os.fstat(descriptor)) != at:
        raise StorageFailed(
            f"{root} is no longer the same directory: it was moved or remounted",
            hint="put it back, or stop the daemon and start it on the right directory",
        )


@contextmanager
def absent() -> Iterator[None]:
    """Ignore the error if there is nothing at the requested place."""
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            raise


def open_directory(parent: int, name: str, make: bool) -> int:
    """A descriptor of the directory `name`, which is made if it does not exist and `make` allows it."""
    try:
        return os.open(name, DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another thread may have been faster
        os.mkdir(name, dir_fd=parent)
    return os.open(name, DIRECTORY, dir_fd=parent)


def remove_empty(parent: int, name: str) -> bool:
    """Remove an empty directory; False if it is not empty, or not a directory."""
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


def newest_change(directory: int) -> float:
    """When the open directory, or something below it, was last changed, in seconds of the storage's clock."""
    own = os.fstat(directory)
    newest = max(own.st_mtime, own.st_ctime)  # a rename changes the second one
    for entry in os.listdir(directory):
        with suppress(FileNotFoundError):
            status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
            newest = max(newest, status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                below = os.open(entry, DIRECTORY, dir_fd=directory)
                try:
                    newest = max(newest, newest_change(below))
                finally:
                    os.close(below)
    return newest
