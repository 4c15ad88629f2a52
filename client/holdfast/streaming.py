"""Copies of memory past the cores' caches, and looks at many places of it, by a few lines of C (`streaming.c`) where they
were built, else by numpy.

A copy of what no cache holds takes two thirds of the time this way, and leaves the training its caches. The library is
built with the package where there is an x86-64 and a compiler (`hatch_build.py`); other processors notice long copies by
themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
LIBRARY = Path(__file__).with_name("_streaming.so")

Array = NDArray[Any]


def _load() -> Any:
    """The library, whose functions run without the GIL; None where it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.holdfast_copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_copy_one.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        library.holdfast_copy.restype = library.holdfast_copy_one.restype = library.holdfast_read.restype = None
        library.holdfast_prove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        library.holdfast_prove_file.argtypes = (ctypes.c_int, ctypes.c_int64, *library.holdfast_prove.argtypes[1:])
        library.holdfast_digest.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        library.holdfast_sample.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        library.holdfast_digest.restype = library.holdfast_sample.restype = None
        library.holdfast_prove.restype = library.holdfast_prove_file.restype = ctypes.c_size_t
    except (OSError, AttributeError):
        return None
    return library


_library = _load()


def library() -> Any:
    """The functions of `streaming.c`; None where there are none here."""
    return _library


def available() -> bool:
    """Whether copies go past the caches here."""
    return _library is not None


def is_plain(target: Array, source: Array) -> bool:
    """Whether the bytes of the one can be copied over those of the other as they stand."""
    whole = target.flags.c_contiguous and source.flags.c_contiguous and target.flags.writeable
    return whole and (target.dtype, target.shape) == (source.dtype, source.shape)


class Copies:
    """Pairs of a target and a source, plain and apart from each other: one call copies them all."""

    def __init__(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Raises `ValueError` for a pair that is not plain."""
        if not all(is_plain(*pair) for pair in pairs):
            raise ValueError("only plain arrays are copied by their bytes")
        self._pairs = pairs
        self._table = np.array([(t.ctypes.data, s.ctypes.data, t.nbytes) for t, s in pairs], np.uint64).reshape(-1, 3)
        self._at, self._count = self._table.ctypes.data, len(self._table)

    def do(self) -> None:
        """Copy them, without the GIL."""
        if _library is not None:
            _library.holdfast_copy(self._at, self._count)
            return
        for target, source in self._pairs:
            np.copyto(target, source)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes over bytes, past the caches and without the GIL. Raises `ValueError` where their lengths differ."""
    into, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if _library is None:
        np.copyto(into, data)
    elif target.readonly or len(into) != len(data):
        raise ValueError(f"{len(data)} bytes cannot be copied over {len(into)}")
    else:
        _library.holdfast_copy_one(into.ctypes.data, data.ctypes.data, len(data))


def digests(boxes: NDArray[np.uint64], native: int, step: int | None) -> NDArray[np.uint64]:
    """The digests of boxes (rows of address and bytes), of a sample for a step or of all with none; needs the library.

    `native` is where the digest of memory is computed.
    """
    boxes, values = np.ascontiguousarray(boxes), np.empty(len(boxes), np.uint64)
    if step is None:
        _library.holdfast_digest(boxes.ctypes.data, len(boxes), native, values.ctypes.data)
    else:
        _library.holdfast_sample(boxes.ctypes.data, len(boxes), step, native, values.ctypes.data)
    return values


class Words:
    """A few elements of each of many arrays, integers of up to eight bytes, all read at once."""

    def __init__(self, views: Sequence[Array]) -> None:
        """`views` show these elements and no others; `sizes` says how many each has."""
        self._views = [view.view(f"u{view.itemsize}") for view in views]  # they keep the memory in place
        places = [_addresses(view) for view in views]
        self.sizes = [len(found) for found in places]
        widths = np.repeat([view.itemsize for view in views], self.sizes)
        self.table = np.stack([np.concatenate([*places, _NOWHERE]), widths.astype(np.uint64)], axis=1)

    def now(self) -> bytes:
        """Their values, in order, each as eight bytes."""
        return look([self])[0]

    def _as_numpy_reads_them(self) -> bytes:
        flat = [view.reshape(-1) for view in self._views]
        return np.concatenate([*flat, _NOWHERE], dtype=np.uint64, casting="unsafe").tobytes()


def look(words: Sequence[Words]) -> list[bytes]:
    """What each of them says `now`, all by one call: far-off places are asked for together, and come sooner."""
    if _library is None or not words:
        return [some._as_numpy_reads_them() for some in words]
    table = np.concatenate([some.table for some in words]) if len(words) > 1 else words[0].table
    values = np.empty(len(table), np.uint64)
    _library.holdfast_read(table.ctypes.data, len(table), values.ctypes.data)
    found, at = values.tobytes(), 0
    parts = []
    for some in words:
        parts.append(found[at : at + WORD_BYTES * len(some.table)])
        at += len(parts[-1])
    return parts


_NOWHERE = np.empty(0, np.uint64)


def _addresses(view: Array) -> NDArray[np.uint64]:
    """Where each element is, in order."""
    found = np.array(view.ctypes.data, np.int64)
    for size, stride in zip(view.shape, view.strides, strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found.reshape(-1).astype(np.uint64)
