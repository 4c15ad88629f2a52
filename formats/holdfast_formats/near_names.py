"""Suggests the names that a mistyped one may stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice

CLOSE = 0.6
COMPARED_MAX = 20_000  # names; comparing that many takes a quarter of a second
LENGTH_MAX = 200
SUGGESTED_MAX = 3


def did_you_mean(name: str, known: Iterable[str], hint: str, close: float = CLOSE, most: int = SUGGESTED_MAX) -> str:
    """The hint, after a question with up to `most` names if some are near. `close` is from 0 to 1, for equal."""
    near = get_close_matches(name[:LENGTH_MAX], list(islice(known, COMPARED_MAX)), most, close)
    return f"did you mean {' or '.join(near)}? {hint}" if near else hint


def one_of(name: str, known: Sequence[str], what: str) -> str:
    """A hint with all known names, after the nearest ones: "did you mean optim? groups: model, optim"."""
    return did_you_mean(name, known, f"{what}: {', '.join(known) or 'none'}")
