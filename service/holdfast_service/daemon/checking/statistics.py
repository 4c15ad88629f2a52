"""Statistics of a tensor's values: counts, extremes and moments of every element.

One pass over memory, in blocks that fit the CPU cache. It uses numpy, which releases the interpreter lock. Sums
are 64-bit floats, whatever the dtype is.
"""

from __future__ import annotations

import threading
from functools import cache
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.rest.statistics import PartStatistics, merge
from holdfast_formats.staging.holdings import Bytes

BLOCK = 2**17  # elements
# Of products at a time. Short, so that sums of 32-bit floats lose nothing worth telling before a 64-bit one takes them up;
# and beyond 10 000 elements OpenBLAS would share the work with threads that have not given way.
_RUN = 2**10
_SAFE = {4: 2.0**50, 8: 2.0**500}  # squares of what is between this and its inverse neither overflow nor vanish

Numbers = NDArray[Any]

_SMALL_FLOATS = ("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_NO_NUMBERS = ("F4", "F6_E2M3", "F6_E3M2", "C64")  # narrower than a byte, or without an order


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.raw = np.empty((2, BLOCK * 8), np.uint8)
        self.narrow = np.empty((2, BLOCK), np.float32)
        self.moved = np.empty(BLOCK, np.float32)
        self.flags = np.empty(BLOCK, np.bool_)


_scratch = _Scratch()
_ones = {4: np.ones((_RUN, 1), np.float32), 8: np.ones((_RUN, 1), np.float64)}


def measure(dtype: str, data: Bytes, before: Bytes | None = None) -> PartStatistics:
    """Statistics of a tensor's bytes (whole elements); with the previous bytes, also how much they changed.

    Dtypes without one real number per element (`C64`, and floats smaller than a byte) are not counted.
    """
    if dtype in _NO_NUMBERS:
        return PartStatistics(change=None)
    step = BLOCK * dtypes.bits(dtype) // 8
    parts = []
    # Non-finite values make differences that are none: they are counted, and left out.
    with np.errstate(all="ignore"):
        for at in range(0, data.nbytes, step):
            old = None if before is None else before[at : at + step]
            parts.append(_measure_block(dtype, data[at : at + step], old))
    return merge(parts)


def _measure_block(dtype: str, data: Bytes, before: Bytes | None) -> PartStatistics:
    numbers = _numbers(dtype, data, 0)
    size = numbers.size
    low, high = float(np.minimum.reduce(numbers)), float(np.maximum.reduce(numbers))
    zeros = 0
    if not low > 0 and not high < 0:  # also where they are NaN
        zeros = int(np.count_nonzero(np.equal(numbers, 0, out=_scratch.flags[:size])))
    change = None if before is None else _distance(numbers, _numbers(dtype, before, 1))
    nan = inf = 0
    if not (isfinite(low) and isfinite(high)):
        nan = int(np.count_nonzero(np.isnan(numbers)))
        numbers = numbers[np.isfinite(numbers)]
        inf = size - nan - numbers.size
        if not numbers.size:
            return PartStatistics(0, nan, inf, zeros, change=change)
        low, high = float(numbers.min()), float(numbers.max())
    numbers, scale = _scaled(numbers, max(-low, high))
    mean, norm = _sum(numbers) / numbers.size * scale, sqrt(_squares(numbers)) * scale
    return PartStatistics(numbers.size, nan, inf, zeros, low, high, mean, norm, change)


def _scaled(numbers: Numbers, peak: float) -> tuple[Numbers, float]:
    """Floats whose squares can be summed, and their divisor; `peak` is the largest magnitude."""
    if numbers.dtype == np.float32 and (not peak or 1 / _SAFE[4] < peak < _SAFE[4]):
        return numbers, 1.0
    wide = numbers.astype(np.float64, copy=False)
    if not peak or 1 / _SAFE[8] < peak < _SAFE[8]:
        return wide, 1.0
    return wide / peak, peak


def _distance(now: Numbers, before: Numbers) -> float:
    """The norm of the difference over elements that are finite in both."""
    if now.dtype == np.float32:
        moved = np.subtract(now, before, out=_scratch.moved[: now.size])
        total = _squares(moved)
        if 1 / _SAFE[4] < total < _SAFE[4]:
            return sqrt(total)
    moved = np.subtract(now, before, dtype=np.float64)
    total = _squares(moved)
    if 1 / _SAFE[8] < total < _SAFE[8] or not moved.any():
        return sqrt(total)
    moved = moved[np.isfinite(moved)]
    moved, scale = _scaled(moved, float(np.max(np.abs(moved), initial=0.0)))
    return sqrt(_squares(moved)) * scale


def _numbers(dtype: str, data: Bytes, which: int) -> Numbers:
    """A block's elements as numbers of their own width, or of 32 bits if numpy has no fast way with theirs.

    `which` selects one of two scratch memories, valid until the next block of that number.
    """
    if dtype == "BOOL":
        return data.view(np.uint8)
    kind = dtypes.to_numpy(dtype)
    size = data.nbytes // kind.itemsize
    narrow = _scratch.narrow[which, :size]
    if dtype in _SMALL_FLOATS:
        return np.take(_values(dtype), data, out=narrow, mode="clip")
    if data.ctypes.data % kind.itemsize:  # a tensor may begin anywhere in its file
        data, source = _scratch.raw[which, : data.nbytes], data
        np.copyto(data, source)
    if dtype == "BF16":  # the upper half of a 32-bit float
        bits = narrow.view(np.uint32)
        np.copyto(bits, data.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
        return narrow
    if dtype == "F16":
        np.copyto(narrow, data.view(np.float16))
        return narrow
    return data.view(kind)


@cache
def _values(dtype: str) -> NDArray[np.float32]:
    """The value of each byte."""
    values: NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(dtypes.to_numpy(dtype)).astype(np.float32)
    return values


def _sum(numbers: Numbers) -> float:
    whole, rest = _cut(numbers)
    total = float((whole.reshape(-1, 1, _RUN) @ _ones[numbers.itemsize]).sum(dtype=np.float64)) if whole.size else 0.0
    return total + float(rest.sum(dtype=np.float64))


def _squares(numbers: Numbers) -> float:
    whole, rest = _cut(numbers)
    total = 0.0
    if whole.size:
        total = float((whole.reshape(-1, 1, _RUN) @ whole.reshape(-1, _RUN, 1)).sum(dtype=np.float64))
    return total + float(rest @ rest)


def _cut(numbers: Numbers) -> tuple[Numbers, Numbers]:
    at = numbers.size - numbers.size % _RUN
    return numbers[:at], numbers[at:]
