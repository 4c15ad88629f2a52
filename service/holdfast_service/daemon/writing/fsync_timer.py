"""A tier wrapper that measures fsync time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from holdfast_service.storage import FileWriter, Tier
from holdfast_service.storage.tier import Buffer


class FsyncTimed:
    """The tier behind it in everything; `seconds` is what the fsync of the files made through it took, in sum."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def create(self, path: str, size: int) -> FileWriter:
        return _TimedFile(self._tier.create(path, size), self)

    def join(self, path: str, size: int) -> FileWriter:
        return _TimedFile(self._tier.join(path, size), self)

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


class _TimedFile:
    def __init__(self, file: FileWriter, told: FsyncTimed) -> None:
        self._file, self._told = file, told

    @property
    def alignment(self) -> int:
        return self._file.alignment

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._file.write(offset, buffers)

    def finish(self) -> None:
        began = time.monotonic()
        try:
            self._file.finish()
        finally:
            self._told.add(time.monotonic() - began)

    def discard(self) -> None:
        self._file.discard()
