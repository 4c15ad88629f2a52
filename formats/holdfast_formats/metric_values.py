"""Metrics that are no finite numbers, for which JSON has no number: they are stored and served as words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Word = Literal["NaN", "Infinity", "-Infinity"]
# Always these objects: containers of equal metrics are equal then, which those of two NaN are not.
_VALUES: dict[Word, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def word(value: float) -> Word | None:
    """None for a finite number."""
    if math.isfinite(value):
        return None
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def shared(value: float) -> float:
    """The value; if it is NaN, always the same object."""
    return math.nan if math.isnan(value) else value


def split(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Word]]:
    """The finite ones, and the words of the others."""
    words = {name: known for name, value in metrics.items() if (known := word(value)) is not None}
    return {name: value for name, value in metrics.items() if name not in words}, words


def joined(finite: Mapping[str, float], words: Mapping[str, Word]) -> dict[str, float]:
    """The reverse of `split`."""
    return {**finite, **{name: _VALUES[known] for name, known in words.items()}}


def read(stored: float | Word) -> float:
    """The reverse of `written`."""
    return _VALUES[stored] if isinstance(stored, str) else stored


def written(value: float) -> float | Word:
    """As JSON has it: a number, or a word."""
    return word(value) or value


def text(value: float) -> str:
    """For people: six digits, or the word."""
    return word(value) or f"{value:.6g}"
