"""Callbacks for the progress of long work."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Protocol, TextIO

from holdfast_service.daemon.copying.copies import CopyControl

PRINTED_EVERY_S = 0.2


class Progress(Protocol):
    """Receives the progress of work; it may raise, to stop the work."""

    def report(self, done_bytes: int, total_bytes: int) -> None: ...


class Quiet:
    """Ignores progress."""

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Hear it and go on."""


class Printed:
    """Prints progress as lines of JSON, `[done, total]`, at intervals. Without a reader, the work continues."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._next_s = to, 0.0

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Print it, if the last line is some time ago."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PRINTED_EVERY_S
        with suppress(OSError, ValueError):
            print(json.dumps([done_bytes, total_bytes]), file=self._to, flush=True)


def going(progress: Progress, total: int) -> CopyControl:
    """Control of a copy of so many bytes that reports to `progress`."""
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        progress.report(min(done, total), total)

    return CopyControl(moved=moved)
