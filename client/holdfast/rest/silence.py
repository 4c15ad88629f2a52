"""Says that a service does not answer, while it is waited for. It imports little: every command does that first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SILENCE_S = 5.0

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def silence_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Within the block, `tell` is told, by another thread, of each service that has been silent for some seconds."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


@contextmanager
def awaited(address: str, later: bool) -> Iterator[None]:
    """An answer of the service at this address is waited for within the block; one that is to come `later`, silently."""
    tell = _told.get()
    if tell is None or later:
        yield
        return
    said = f"no answer from {address.rstrip('/')} for {SILENCE_S:g} s: still waiting"
    timer = threading.Timer(SILENCE_S, tell, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
