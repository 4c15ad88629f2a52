"""The arithmetic of a fold in C: the same bits as with numpy, for any values, lengths and places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.daemon.averaging import native_lerp
from holdfast_service.daemon.averaging.folding import Lerp

needs_library = pytest.mark.skipif(not native_lerp.available(), reason="native_lerp.c was not built here")
WEIGHTS = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 2.0**-149, 1e-4, 0.49999997, 0.5, 0.50000006, 1.0]))


def with_numpy(old: np.ndarray, new: np.ndarray, weight: float) -> np.ndarray:
    found = np.empty_like(old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_lerp, "_library", None)
        Lerp(weight)(old, new, found)
    return found


@needs_library
@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(0, 7), WEIGHTS)
def test_any_bits_give_the_same_bits(seed: int, count: int, begin: int, weight: float) -> None:
    """Numbers of all sizes, the smallest ones, infinities; where one is no number, both say so."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, (2, begin + count), np.uint32)
    old, new = bits.view(np.float32)[:, begin:]
    near = random.random(count) < 0.5  # of each other, as weights and their averages are
    new = np.where(near, (old.view(np.uint32) ^ np.uint32(1)).view(np.float32), new)
    found = np.empty(count + begin, np.float32)[begin:]
    assert native_lerp.lerp(old, new, found, weight)
    expected = with_numpy(old, new, weight)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@needs_library
def test_much_gives_the_same_bits() -> None:
    """Millions of elements, as training has them."""
    random = np.random.default_rng(1)
    old = random.standard_normal(2_000_003, np.float32)
    new = old + random.standard_normal(len(old), np.float32) * np.float32(1e-3)
    for weight in (1e-4, 0.1, 0.7):
        found = np.empty_like(old)
        assert native_lerp.lerp(old, new, found, weight)
        assert np.array_equal(found.view(np.uint32), with_numpy(old, new, weight).view(np.uint32))


@needs_library
def test_what_it_cannot_do_is_left_alone() -> None:
    """Elements that are apart, or of another type; lengths that differ are refused."""
    values = np.zeros(8, np.float32)
    assert not native_lerp.lerp(values[::2], values[:4], values[4:], 0.5)
    assert not native_lerp.lerp(values.astype(np.float64), values, values, 0.5)
    with pytest.raises(ValueError, match="8 and 4 elements"):
        native_lerp.lerp(values, values[:4], values.copy(), 0.5)


def test_without_the_library_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not an error that there is none."""
    monkeypatch.setattr(native_lerp, "_library", None)
    values = np.ones(4, np.float32)
    assert not native_lerp.available()
    assert not native_lerp.lerp(values, values, values.copy(), 0.5)
