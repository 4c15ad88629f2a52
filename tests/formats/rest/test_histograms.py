"""Histograms: every value once, in numpy's bins, whatever the range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast_formats.rest import comparing, histograms


def octets(array: Any) -> list[Any]:
    """As two pieces."""
    data = np.frombuffer(array.tobytes(), np.uint8)
    cut = len(array) // 2 * array.itemsize
    return [data[:cut], data[cut:]]


def test_as_numpy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, with what is not finite apart."""
    monkeypatch.setattr(histograms, "BLOCK_ELEMENTS", 7)
    array = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    array[[3, 500]] = np.nan, np.inf
    found = histograms.histogram(lambda: histograms.values(octets(array), "F32"), 10)
    finite = array[np.isfinite(array)].astype(np.float64)
    assert (found.elements, found.nonfinite) == (1000, 2)
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert found.counts == np.histogram(finite, 10)[0].tolist()


def test_of_a_difference() -> None:
    """b − a, of tensors that are cut otherwise; infinity minus infinity is not finite."""
    a, b = np.array([1, 2, np.inf, 4], np.float32), np.array([1, 3, np.inf, 2], np.float32)
    whole = [np.frombuffer(a.tobytes(), np.uint8)]
    found = histograms.histogram(lambda: histograms.changes(whole, octets(b), "F32"), 3)
    assert (found.minimum, found.maximum, found.nonfinite, found.counts) == (-2.0, 1.0, 1, [1, 0, 2])


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([5.0, 5.0, 5.0], [3]),
        ([-1.7e308, 0.0, 1.7e308], [1, 1, 1]),
        ([0.0, 5e-324, 1e-323], [1, 1, 1]),
        ([np.nan, np.inf], []),
        ([], []),
    ],
)
def test_ranges_that_are_hard(values: list[float], counts: list[int]) -> None:
    """One value, the largest and the smallest numbers, and none."""
    array = np.array(values, np.float64)
    found = histograms.histogram(lambda: histograms.values(octets(array), "F64"), 3)
    assert found.counts == counts and sum(counts) + found.nonfinite == found.elements == len(values)
    assert comparing.BLOCK_ELEMENTS == histograms.BLOCK_ELEMENTS
