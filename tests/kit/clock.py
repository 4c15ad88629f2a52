"""Time that a test moves."""

from __future__ import annotations

from typing import Generic, TypeVar

Time = TypeVar("Time", float, str)


class Clock(Generic[Time]):
    """Says what `now` is, in seconds or as text."""

    def __init__(self, now: Time) -> None:
        self.now = now

    def __call__(self) -> Time:
        return self.now
