"""The digest of extents, headers and small files: XXH3, 64 bits, seed 0, as 16 lower-case hexadecimal digits."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import xxhash

from .errors import InvalidRequest

DIGITS = 16
_SPELLED = re.compile(f"[0-9a-f]{{{DIGITS}}}")
# The names in xxhash.h: the first uses the processor's widest vectors, whatever the library was compiled for.
_NATIVE = ("XXH3_64bits_dispatch", "XXH3_64bits")
# XXH3 treats these ranges of lengths differently.
_SAMPLE, _SAMPLE_SIZES = bytes(range(251)) * 20, (0, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 5020)
_HEXADECIMAL = b"0123456789abcdef"


def digest(data: Any) -> str:
    """xxh3-64 of a contiguous buffer (bytes, memoryview or numpy array); the GIL is released while it runs."""
    return xxhash.xxh3_64_hexdigest(data)


def number(data: Any) -> int:
    """The digest as a number, for comparing many."""
    return xxhash.xxh3_64_intdigest(data)


def running() -> xxhash.xxh3_64:
    """A running digest of a buffer that comes in parts: `update(part)`, and `hexdigest()` at the end."""
    return xxhash.xxh3_64()


@lru_cache
def native() -> int | None:
    """The address of the library's own `uint64_t (const void *, size_t)`, for code outside Python; None if it is hidden.

    Before it is returned, its digests of short and long data are compared with Python's `number`.
    """
    module = find_spec("xxhash._xxhash")
    if module is None or module.origin is None:
        return None
    try:
        library = ctypes.PyDLL(module.origin)
    except OSError:
        return None
    for name in _NATIVE:
        function = getattr(library, name, None)
        if function is None:
            continue
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
        if all(function(data, len(data)) == number(data) for data in (_SAMPLE[:size] for size in _SAMPLE_SIZES)):
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def check_digest(text: str) -> None:
    """Refuse text that is not a digest, so that a manifest with an empty one never counts as verified."""
    if not _SPELLED.fullmatch(text):
        raise InvalidRequest(f"{text!r} is not an xxh3-64 digest of {DIGITS} hexadecimal digits")


def check_digests(texts: Collection[str]) -> None:
    joined = "".join(texts)
    if not set(map(len, texts)) <= {DIGITS} or not joined.isascii() or joined.encode().translate(None, _HEXADECIMAL):
        for text in texts:
            check_digest(text)
