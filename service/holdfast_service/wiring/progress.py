"""How far long work is: who hears of it."""

from __future__ import annotations

from typing import Protocol

from holdfast_service.daemon.copying.copies import Going


class Progress(Protocol):
    """Receives the progress of work; it may raise, to stop the work."""

    def report(self, done_bytes: int, total_bytes: int) -> None: ...


class Quiet:
    """Ignores progress."""

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Hear it and go on."""


def going(progress: Progress, total: int) -> Going:
    """Control of a copy of so many bytes that reports to `progress`."""
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        progress.report(min(done, total), total)

    return Going(moved=moved)
