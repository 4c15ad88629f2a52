"""Files that stand in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class FilesInMemory:
    """`holdfast_formats.files.Files`, with every read noted in `reads`: path, offset, bytes."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files, self.reads = files, list[tuple[str, int, int]]()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0
        data = self.files[path][offset:][:length]
        self.reads.append((path, offset, len(data)))
        return data

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        data = self.read(path, offset, buffer.nbytes)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def list(self, path: str) -> list[str]:
        return sorted(self.files)
