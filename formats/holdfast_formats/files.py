"""The interface of files that are read: of a directory, a storage tier, a service, or the memory of ranks."""

from __future__ import annotations

from typing import Any, Protocol


class Files(Protocol):
    """Files by relative path, with `/`; a link that leads out counts as missing. Safe for threads."""

    @property
    def label(self) -> str:
        """The place of the files, as messages name it."""

    def size(self, path: str, /) -> int | None:
        """Bytes of a file, None if there is no file at `path`."""

    def stamp(self, path: str, /) -> str:
        """A text that changes when the file at `path` is written, replaced or made again; empty if there is no file."""

    def list(self, path: str, /) -> list[str]:
        """The names in a directory, `""` for the top, sorted; empty for anything but a directory."""

    def read(self, path: str, /, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; fewer than `length` only at its end, and no more memory is taken than there are."""

    def read_into(self, path: str, /, offset: int, buffer: Any) -> int:
        """Fill a contiguous `buffer`; the number of bytes read, fewer than it holds only at the file's end."""

    def read_stored(self, path: str, /, offset: int, buffer: Any) -> int:
        """`read_into` for verification of stored bytes: past any cache if offset, length and memory are aligned."""
