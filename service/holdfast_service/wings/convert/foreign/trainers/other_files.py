"""A directory without some of its files, for the reader of what is left."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast_formats.files import Files


class OtherFiles:
    """The files of a source, except these of its top directory."""

    def __init__(self, files: Files, without: Collection[str]) -> None:
        self._files, self._without = files, without
        self.label = files.label

    def size(self, path: str) -> int | None:
        return None if path in self._without else self._files.size(path)

    def stamp(self, path: str) -> str:
        return self._files.stamp(path)

    def list(self, path: str) -> list[str]:
        names = self._files.list(path)
        return names if path else [name for name in names if name not in self._without]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._files.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_into(path, offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_stored(path, offset, buffer)
