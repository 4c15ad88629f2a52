"""When the validators of our pydantic models are built: at import, or each at its first use.

Building all of them takes a fifth of a second, and a command needs a few. Two threads that build the same one at its first
use are not safe, so only the command line, which asks the API in one thread, has them built late.
"""

from __future__ import annotations

_late = False


def build_late() -> None:
    """Build each model at its first use. To be called before anything that has models is imported."""
    global _late
    _late = True


def late() -> bool:
    return _late
