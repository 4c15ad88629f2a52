"""Histograms of a tensor's values, or of how far they moved, computed from its bytes in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.rest.comparing import BLOCK_ELEMENTS, Octets, as_float, blocks
from holdfast_formats.rest.measurements import TensorHistogram

BINS = 60
Values = NDArray[np.float64]


def values(octets: Iterable[Octets], dtype: str) -> Iterator[Values]:
    """The elements of a tensor, at most `BLOCK_ELEMENTS` at a time."""
    element = dtypes.to_numpy(dtype)
    step = BLOCK_ELEMENTS * element.itemsize
    for part in octets:
        for start in range(0, len(part), step):
            yield as_float(part[start : start + step], element)


def changes(a: Iterable[Octets], b: Iterable[Octets], dtype: str) -> Iterator[Values]:
    """The elements of b − a, for tensors of one shape and dtype."""
    for left, right in blocks(a, b):
        for before, after in zip(values([left], dtype), values([right], dtype), strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                yield after - before


def histogram(read: Callable[[], Iterable[Values]], bins: int = BINS) -> TensorHistogram:
    """`read` is called twice: for the range, then for the counts. Equal values are one bin."""
    elements = finite = 0
    low, high = np.inf, -np.inf
    for part in read():
        known = part[np.isfinite(part)]
        elements, finite = elements + part.size, finite + known.size
        low, high = min(low, float(known.min(initial=np.inf))), max(high, float(known.max(initial=-np.inf)))
    if not finite:
        return TensorHistogram(elements=elements, nonfinite=elements, minimum=None, maximum=None, counts=[])
    counted = np.zeros(bins, np.int64) if low < high else np.array([finite])
    if low < high:
        scale = 1.0 if isfinite(high - low) else 0.25  # of the largest numbers, the difference is none
        for part in read():
            known = part[np.isfinite(part)] * scale
            place = (known - low * scale) / (high * scale - low * scale) * bins
            counted += np.bincount(np.minimum(place.astype(np.int64), bins - 1), minlength=bins)
    return TensorHistogram(
        elements=elements, nonfinite=elements - finite, minimum=low, maximum=high, counts=[int(one) for one in counted]
    )
