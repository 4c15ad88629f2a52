"""Decides when the validators of our pydantic models are built: at import, or each at its first use.

Building all takes a fifth of a second, and a command needs a few. Building one in two threads at its first use is unsafe, so
only the command line, which calls the API in one thread, has them built late.
"""

from __future__ import annotations

_late = False


def build_late() -> None:
    """Build each model at its first use. To be called before anything that has models is imported."""
    global _late
    _late = True


def late() -> bool:
    return _late
