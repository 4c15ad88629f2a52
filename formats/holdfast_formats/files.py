"""The interface of files that are read: of a directory, a storage tier, a service, or the memory of ranks."""

from __future__ import annotations

import os
from typing import Any, Protocol

from .errors import InvalidRequest

NAME_BYTES_MAX = 255  # of every file system


class Files(Protocol):
    """Files by relative path, with `/`; a link that leads out counts as missing. Safe for threads."""

    @property
    def label(self) -> str:
        """The place of the files, as messages name it."""

    def size(self, path: str, /) -> int | None:
        """Bytes of a file, None if there is no file at `path`."""

    def stamp(self, path: str, /) -> str:
        """A text that changes when the file at `path` is written, replaced or made again; empty if there is no file, or
        if that cannot be said. It begins with the file's size in hexadecimal digits and a dot.
        """

    def list(self, path: str, /) -> list[str]:
        """The names in a directory, `""` for the top, sorted; empty for anything but a directory."""

    def read(self, path: str, /, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; fewer than `length` only at its end, and no more memory is taken than there are."""

    def read_into(self, path: str, /, offset: int, buffer: Any) -> int:
        """Fill a contiguous `buffer`; the number of bytes read, fewer than it holds only at the file's end."""

    def read_stored(self, path: str, /, offset: int, buffer: Any) -> int:
        """`read_into` for verification of stored bytes: past any cache if offset, length and memory are aligned."""


def split_path(path: str) -> list[str]:
    """The names along a path, empty for the root; `InvalidRequest` for a path that could lead out of the root."""
    if path == "":
        return []
    names = path.split("/")
    if "\0" in path or any(name in ("", ".", "..") for name in names):
        raise InvalidRequest(f"{path!r} is not a path below the root", hint="use names separated by single slashes")
    if len(path) > NAME_BYTES_MAX // 4 and any(len(os.fsencode(name)) > NAME_BYTES_MAX for name in names):
        raise InvalidRequest(f"{path[:80]!r}… has a name of more than {NAME_BYTES_MAX} bytes", hint="choose a shorter name")
    return names


def split_leaf(path: str) -> tuple[list[str], str]:
    """The names of the parent directory and the last name; `InvalidRequest` for the root itself."""
    *parent, leaf = split_path(path) or [""]
    if not leaf:
        raise InvalidRequest("the root itself cannot be written, moved or removed")
    return parent, leaf


def check_position(path: str, offset: int, length: int) -> None:
    """Refuse bytes before a file's beginning."""
    if offset < 0 or length < 0:
        raise InvalidRequest(f"{path}: {length} bytes at {offset} cannot be read")
