"""Measures how long the fsync of a save's files takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_service.storage import FileWriter, StagedCheckpoint
from holdfast_service.storage.tier import Buffer


class FsyncTimed:
    """Wraps a staged checkpoint; `seconds` is the sum of fsync times of the files made through it."""

    def __init__(self, staged: StagedCheckpoint) -> None:
        self._staged, self._lock = staged, threading.Lock()
        self.seconds = 0.0

    @property
    def place(self) -> Place:
        return self._staged.place

    @property
    def files(self) -> Files:
        return self._staged.files

    @property
    def path(self) -> str:
        return self._staged.path

    def create(self, file: str, size: int) -> FileWriter:
        return _TimedFile(self._staged.create(file, size), self)

    def go_on(self) -> dict[str, int]:
        return self._staged.go_on()

    def put(self, file: str, data: bytes) -> None:
        self._staged.put(file, data)

    def drop(self, file: str) -> None:
        self._staged.drop(file)

    def clear(self) -> None:
        self._staged.clear()

    def sync(self, file: str) -> None:
        self._staged.sync(file)

    def take(self, file: str, step: int, run: str | None = None) -> bool:
        return self._staged.take(file, step, run)

    def put_receipt(self, node: str, data: bytes) -> None:
        self._staged.put_receipt(node, data)

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


class _TimedFile:
    def __init__(self, file: FileWriter, fsync_timed: FsyncTimed) -> None:
        self._file, self._told = file, fsync_timed

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
