"""TOML as plain values, of a text that may be anything: what the parser would take minutes over is refused before."""

from __future__ import annotations

import re
from typing import Any

import msgspec

KEY_PARTS_MAX = 64
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_LONG_KEY = re.compile(rf"(?:[A-Za-z0-9_-]|[\"'])[ \t]*(?:\.[ \t]*{_PART}[ \t]*){{{KEY_PARTS_MAX}}}".encode())


def decode(data: bytes) -> dict[str, Any]:
    """The document; `ValueError` or `RecursionError` for a text that is none, or with a key of more than `KEY_PARTS_MAX`
    parts: for these the parser takes time by the square of their number.
    """
    if _LONG_KEY.search(data):
        raise ValueError(f"a key has more than {KEY_PARTS_MAX} parts")
    try:
        return msgspec.toml.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise ValueError(str(problem)) from None
