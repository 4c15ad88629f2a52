"""Files of a directory on the disk, as adapters read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class OnDisk:
    """A directory's files, without following links out of it: tests have none."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with (self.top / path).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        data = self.read(path, offset, buffer.nbytes)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def size(self, path: str) -> int | None:
        file = self.top / path
        return file.stat().st_size if file.is_file() else None

    def list(self, path: str) -> list[str]:
        folder = self.top / path
        return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
