"""Statistics of a tensor's values: counts, extremes and moments of every element.

One pass over memory, in blocks that fit the CPU cache. It uses numpy, which releases the interpreter lock. Sums
are 64-bit floats, whatever the dtype is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.rest.statistics import PartStatistics, Table, listed, merge, tabulate
from holdfast_formats.staging.holdings import Bytes

BLOCK = 2**17  # elements
# Of products at a time. Short, so that sums of 32-bit floats lose nothing worth telling before a 64-bit one takes them up;
# and beyond 10 000 elements OpenBLAS would share the work with threads that have not given way.
_RUN = 2**10
_SAFE = {4: 2.0**50, 8: 2.0**500}  # squares of what is between this and its inverse neither overflow nor vanish

Numbers = NDArray[Any]
Parts = Sequence[Bytes] | Bytes  # of equal length; the rows of a table where they follow each other in memory

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
    return listed(measure_alike(dtype, [data], None if before is None else [before]))[0]


def measure_alike(dtype: str, parts: Parts, before: Parts | None = None) -> Table:
    """`measure` of parts of equal length, several at once where they are short. What is found of one does not depend on the
    others.
    """
    if dtype in _NO_NUMBERS:
        return tabulate([PartStatistics(change=None)] * len(parts))
    step = BLOCK * dtypes.bits(dtype) // 8
    size = parts[0].nbytes
    found: list[Table] = []
    # Non-finite values make differences that are none: they are counted, and left out.
    with np.errstate(all="ignore"):
        if size > step or not size:
            for number, part in enumerate(parts):
                cuts = [slice(at, at + step) for at in range(0, size, step)]
                old = None if before is None else before[number]
                blocks = [_measure_rows(dtype, [part[cut]], None if old is None else [old[cut]]) for cut in cuts]
                found.append(tabulate([merge(listed(np.concatenate(blocks)))] if blocks else [merge([])]))
            return np.concatenate(found)
        at_once = step // size
        for at in range(0, len(parts), at_once):
            old_rows = None if before is None else before[at : at + at_once]
            found.append(_measure_rows(dtype, parts[at : at + at_once], old_rows))
    return np.concatenate(found)


def _measure_rows(dtype: str, rows: Parts, before: Parts | None) -> Table:
    """Of rows of equal length, which are no more than a block together."""
    numbers = _table(dtype, rows, 0)
    size = numbers.shape[1]
    low, high = (np.asarray(of.reduce(numbers, axis=1), np.float64) for of in (np.minimum, np.maximum))
    zeros = _zeros(numbers, low, high)
    changes = np.full(len(rows), np.nan) if before is None else _distances(numbers, _table(dtype, before, 1))
    wide = numbers if numbers.dtype == np.float32 else numbers.astype(np.float64, copy=False)
    plain = _are_safe(np.maximum(-low, high), wide.itemsize)
    found: Table = np.zeros((len(rows), len(PartStatistics._fields)))
    found[:, 0] = size
    for column, of in enumerate((zeros, low, high, _sums(wide) / size, np.sqrt(_squares(wide)), changes), 3):
        found[:, column] = of
    for row in np.flatnonzero(~plain).tolist():
        change = None if before is None else float(changes[row])
        found[row] = tabulate([_measure_unusual(numbers[row], int(zeros[row]), change)])[0]
    return found


def _measure_unusual(numbers: Numbers, zeros: int, change: float | None) -> PartStatistics:
    """Of numbers that are not all finite, or whose squares do not fit."""
    size = numbers.size
    nan = int(np.count_nonzero(np.isnan(numbers)))
    numbers = numbers[np.isfinite(numbers)]
    inf = size - nan - numbers.size
    if not numbers.size:
        return PartStatistics(0, nan, inf, zeros, change=change)
    low, high = float(numbers.min()), float(numbers.max())
    numbers, scale = _scaled(numbers, max(-low, high))
    mean, norm = float(_sums(numbers[None])[0]) / numbers.size * scale, sqrt(float(_squares(numbers[None])[0])) * scale
    return PartStatistics(numbers.size, nan, inf, zeros, low, high, mean, norm, change)


def _table(dtype: str, rows: Parts, which: int) -> Numbers:
    data = rows.reshape(-1) if isinstance(rows, np.ndarray) else rows[0] if len(rows) == 1 else np.concatenate(rows)
    return _numbers(dtype, data, which).reshape(len(rows), -1)


def _zeros(numbers: Numbers, low: Numbers, high: Numbers) -> NDArray[np.int64]:
    """The zeros of each row."""
    if not (~(low > 0) & ~(high < 0)).any():  # also where they are NaN
        return np.zeros(len(numbers), np.int64)
    flags = np.equal(numbers, 0, out=_scratch.flags[: numbers.size].reshape(numbers.shape))
    total = int(np.count_nonzero(flags))
    if len(numbers) == 1 or total in (0, numbers.size):
        return np.full(len(numbers), total // len(numbers))
    found: NDArray[np.int64] = np.add.reduce(flags.view(np.uint8), axis=1, dtype=np.int64)
    return found


def _are_safe(peaks: Any, itemsize: int) -> Any:
    """Whether the squares of numbers up to these magnitudes can be summed in floats of so many bytes."""
    return (peaks == 0) | ((1 / _SAFE[itemsize] < peaks) & (peaks < _SAFE[itemsize]))


def _scaled(numbers: Numbers, peak: float) -> tuple[Numbers, float]:
    """Floats whose squares can be summed, and their divisor; `peak` is the largest magnitude."""
    if numbers.dtype == np.float32 and _are_safe(peak, 4):
        return numbers, 1.0
    wide = numbers.astype(np.float64, copy=False)
    if _are_safe(peak, 8):
        return wide, 1.0
    return wide / peak, peak


def _distances(now: Numbers, before: Numbers) -> NDArray[np.float64]:
    """The norm of each row's difference over elements that are finite in both."""
    if now.dtype == np.float32:
        moved = np.subtract(now, before, out=_scratch.moved[: now.size].reshape(now.shape))
    else:
        moved = np.subtract(now, before, dtype=np.float64)
    totals = _squares(moved)
    safe = _SAFE[moved.itemsize]
    found = np.sqrt(totals)
    for row in np.flatnonzero(~((1 / safe < totals) & (totals < safe))).tolist():
        found[row] = _distance(now[row], before[row])
    return found


def _distance(now: Numbers, before: Numbers) -> float:
    """The same of one row, whose squares may not fit."""
    moved = np.subtract(now, before, dtype=np.float64)
    total = float(_squares(moved[None])[0])
    if 1 / _SAFE[8] < total < _SAFE[8] or not moved.any():
        return sqrt(total)
    moved = moved[np.isfinite(moved)]
    moved, scale = _scaled(moved, float(np.max(np.abs(moved), initial=0.0)))
    return sqrt(float(_squares(moved[None])[0])) * scale


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


def _sums(rows: Numbers) -> NDArray[np.float64]:
    """The sum of each row."""
    whole, rest = _cut(rows)
    total = rest.sum(axis=1, dtype=np.float64)
    if whole.size:
        total += (whole @ _ones[rows.itemsize]).reshape(len(rows), -1).sum(axis=1, dtype=np.float64)
    return np.asarray(total)


def _squares(rows: Numbers) -> NDArray[np.float64]:
    """The sum of each row's squares."""
    whole, rest = _cut(rows)
    total = (rest[:, None, :] @ rest[:, :, None]).reshape(len(rows)).astype(np.float64)
    if whole.size:
        runs = whole @ whole.reshape(-1, _RUN, 1)
        total += runs.reshape(len(rows), -1).sum(axis=1, dtype=np.float64)
    return np.asarray(total)


def _cut(rows: Numbers) -> tuple[Numbers, Numbers]:
    """The runs of all rows, and what is left of each."""
    at = rows.shape[1] - rows.shape[1] % _RUN
    return rows[:, :at].reshape(-1, 1, _RUN), rows[:, at:]
