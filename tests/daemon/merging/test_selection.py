"""Ranks by magnitude are exact, equal magnitudes are told apart by their place, and stretches of any length agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_service.daemon.merging.draws import Draws
from holdfast_service.daemon.merging.selection import Selector, magnitude_bits
from holdfast_service.daemon.merging.sparsifying import Sparsity, ThinnedVector, between

NUMBERS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, -2.0])


def chosen(values: NDArray[np.float32], count: int, largest: bool, step: int) -> NDArray[np.bool_]:
    selector = Selector(count, largest)
    scans = 0
    while not selector.ready:
        for at in range(0, values.size, step):
            selector.feed(at, magnitude_bits(values[at : at + step]))
        selector.end_scan()
        scans += 1
        assert scans <= 3
    cut = selector.cut
    assert cut is not None
    masks = []
    for at in range(0, values.size, step):
        found = magnitude_bits(values[at : at + step])
        masks.append(cut.largest(found, at) if largest else cut.smallest(found, at))
    return np.concatenate(masks)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(NUMBERS, min_size=1, max_size=60), st.booleans(), st.integers(1, 61))
def test_the_first_elements(data: st.DataObject, listed: list[float], largest: bool, step: int) -> None:
    """As a stable sort has them."""
    values = np.array(listed, np.float32)
    count = data.draw(st.integers(1, values.size))
    magnitudes = np.abs(values)
    order = np.argsort(-magnitudes if largest else magnitudes, kind="stable")
    wanted = np.zeros(values.size, np.bool_)
    wanted[order[:count]] = True
    assert np.array_equal(chosen(values, count, largest, step), wanted)


def kept(values: NDArray[np.float32], sparsity: Sparsity, step: int = 50) -> NDArray[np.bool_]:
    one = ThinnedVector(sparsity, values.size, 1, Draws(0, 0, "w"))
    while not one.ready:
        for at in range(0, values.size, step):
            one.feed(at, values[at : at + step])
        one.end_scan()
    return np.concatenate([one.mask(at, values[at : at + step]) for at in range(0, values.size, step)])


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("size", [1, 2, 128, 1001])
def test_quantiles_are_numpys(density: float, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    wanted = ~(np.abs(values) < np.quantile(np.abs(values), 1 - density))
    assert np.array_equal(kept(values, Sparsity("trim", density, trim="quantile")), wanted)


@pytest.mark.parametrize(("density", "gamma"), [(0.5, 0.01), (0.9, 0.2), (0.001, 0.0), (0.6, 0.4)])
def test_outliers_go_first(density: float, gamma: float) -> None:
    """So many are left as the density says; where both ends together are too many, fewer of the largest go."""
    values = np.random.default_rng(3).standard_normal(500, np.float32)
    found = kept(values, Sparsity("outliers", density, gamma))
    order = np.argsort(np.abs(values))
    wanted, top = int(density * 500), int(gamma * 500)
    bottom = max(500 - wanted - top, 0)
    assert sorted(np.flatnonzero(found)) == sorted(order[bottom : bottom + wanted])


def test_the_point_between() -> None:
    assert between(np.float32(1), np.float32(2), np.float32(0.25)) == 1.25
    assert between(np.float32(1), np.float32(2), np.float32(0.75)) == 1.75


def test_draws_belong_to_elements() -> None:
    """Any stretch has the draws of the whole; seed, model and tensor each change them; they are uniform."""
    whole = Draws(1, 0, "w").uniform(0, 4000)
    for start, count in ((0, 7), (3, 100), (1024, 5), (3999, 1)):
        assert np.array_equal(Draws(1, 0, "w").uniform(start, count), whole[start : start + count])
    for other in (Draws(2, 0, "w"), Draws(1, 1, "w"), Draws(1, 0, "v")):
        assert abs(np.corrcoef(other.uniform(0, 4000), whole)[0, 1]) < 0.06
    assert abs(whole.mean() - 0.5) < 0.02 and whole.min() >= 0 and whole.max() < 1
    assert whole[:3].tolist() == [0.010547021084200803, 0.7511062032858706, 0.8646723364116469]  # for ever
