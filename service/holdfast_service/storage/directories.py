"""Directories below a root, reached and removed name by name without following a link."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


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
