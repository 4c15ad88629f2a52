"""The digest of extents, headers and small files: XXH3, 64 bits, seed 0, as 16 lower-case hexadecimal digits."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import xxhash

from .errors import InvalidRequest

DIGITS = 16
_SPELLED = re.compile(f"[0-9a-f]{{{DIGITS}}}")
_ALL_SPELLED = re.compile(f"(?:[0-9a-f]{{{DIGITS}}})*")


def digest(data: Any) -> str:
    """xxh3-64 of a contiguous buffer (bytes, memoryview or numpy array); the GIL is released while it runs."""
    return xxhash.xxh3_64_hexdigest(data)


def number(data: Any) -> int:
    """The digest as a number, for comparing many."""
    return xxhash.xxh3_64_intdigest(data)


def running() -> xxhash.xxh3_64:
    """The digest of a buffer that comes in parts: `update(part)`, and `hexdigest()` at the end."""
    return xxhash.xxh3_64()


def check_digest(text: str) -> None:
    """Refuse text that is not a digest, so that a manifest with an empty one can never pass as proven."""
    if not _SPELLED.fullmatch(text):
        raise InvalidRequest(f"{text!r} is not an xxh3-64 digest of {DIGITS} hexadecimal digits")


def check_digests(texts: Collection[str]) -> None:
    """The same for many."""
    if not set(map(len, texts)) <= {DIGITS} or not _ALL_SPELLED.fullmatch("".join(texts)):
        for text in texts:
            check_digest(text)
