"""Parses untrusted TOML to plain values, and refuses text that the parser would take minutes for."""

from __future__ import annotations

import re
from typing import Any

import msgspec

KEY_PARTS_MAX = 64
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_LONG_KEY = re.compile(rf"(?:[A-Za-z0-9_-]|[\"'])[ \t]*(?:\.[ \t]*{_PART}[ \t]*){{{KEY_PARTS_MAX}}}".encode())


def decode(data: bytes) -> dict[str, Any]:
    """The document; `ValueError` or `RecursionError` if it is invalid, or has a key of more than `KEY_PARTS_MAX` parts, for
    which the parser's time is quadratic.
    """
    if _LONG_KEY.search(data):
        raise ValueError(f"a key has more than {KEY_PARTS_MAX} parts")
    try:
        return msgspec.toml.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as problem:
        raise ValueError(str(problem)) from None
