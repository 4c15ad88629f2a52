"""Reports a service that does not answer while a command waits for it. Imports little, because every command imports it
first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SILENCE_S = 5.0

_told: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def silence_reported(tell: Callable[[str], None]) -> Iterator[None]:
    """Within the block, another thread calls `tell` for each service that has been silent for some seconds."""
    before = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(before)


@contextmanager
def awaited(address: str, later: bool) -> Iterator[None]:
    """Within the block, the caller waits for the service at this address; `later`: silence is expected."""
    tell = _told.get()
    if tell is None or later:
        yield
        return
    text = f"no answer from {address.rstrip('/')} for {SILENCE_S:g} s: still waiting"
    timer = threading.Timer(SILENCE_S, tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
