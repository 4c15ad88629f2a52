"""Ranks by magnitude are exact, equal magnitudes are told apart by their place, and stretches of any length agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_service.wings.merge.draws import Draws
from holdfast_service.wings.merge.scanning import Workspace
from holdfast_service.wings.merge.selection import Selector, magnitude_bits
from holdfast_service.wings.merge.sparsifying import Sparsity, ThinnedVector, between, rows_of

NUMBERS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, -2.0])


def scan(selectors: list[Selector], values: NDArray[np.float32], step: int) -> int:
    """Feed the selectors until they are ready; how many scans that took."""
    scans = 0
    while waiting := [one for one in selectors if not one.ready]:
        for number, at in enumerate(range(0, values.size, step)):
            for one in waiting:
                if one.wanted in (None, number):
                    one.add(at, one.measure(magnitude_bits(values[at : at + step])))
        for one in waiting:
            one.end_scan()
        scans += 1
        assert scans <= 5
    return scans


def chosen(values: NDArray[np.float32], selector: Selector, largest: bool, step: int) -> NDArray[np.bool_]:
    scan([selector], values, step)
    cut = selector.cut
    assert cut is not None
    masks = []
    for at in range(0, values.size, step):
        found = magnitude_bits(values[at : at + step])
        masks.append(cut.largest(found, at) if largest else cut.smallest(found, at))
    return np.concatenate(masks)


@given(st.data(), st.lists(NUMBERS, min_size=1, max_size=60), st.booleans(), st.integers(1, 61))
def test_the_first_elements(data: st.DataObject, listed: list[float], largest: bool, step: int) -> None:
    """As a stable sort has them, whatever a sample said, and however few elements may be collected."""
    values = np.array(listed, np.float32)
    count = data.draw(st.integers(1, values.size))
    magnitudes = np.abs(values)
    order = np.argsort(-magnitudes if largest else magnitudes, kind="stable")
    wanted = np.zeros(values.size, np.bool_)
    wanted[order[:count]] = True
    selector = Selector(count, largest, values.size, data.draw(st.sampled_from([0, 1, 5, 100])))
    if data.draw(st.booleans()):
        selector.predict(np.sort(magnitude_bits(np.array(data.draw(st.lists(NUMBERS, max_size=9)), np.float32))))
    assert np.array_equal(chosen(values, selector, largest, step), wanted)


@pytest.mark.parametrize("lumps", [0, 8])
@pytest.mark.parametrize("count", [1, 30_000, 123_456, 199_999])
def test_a_sample_saves_scans(count: int, lumps: int) -> None:
    """One that tells the truth does; a wrong one costs scans, and changes nothing. In lumps many values are equal."""
    values = np.random.default_rng(4).standard_normal(200_000, np.float32)
    if lumps:
        values = np.round(values * lumps) / np.float32(lumps)
    sample = np.sort(magnitude_bits(values)[::10])
    cuts = []
    for said in (sample, np.sort(magnitude_bits(values * 100)[::10])):
        selector = Selector(count, True, values.size, 50_000)
        selector.predict(said)
        scans = scan([selector], values, 10_000)
        assert said is not sample or scans <= 2
        cuts.append(selector.cut)
    assert cuts[0] == cuts[1]


def kept(values: NDArray[np.float32], sparsity: Sparsity, step: int = 50) -> NDArray[np.bool_]:
    one = ThinnedVector(sparsity, values.size, rows_of(values.shape), Draws(0, 0, "w"))
    scan(one.selectors, values, step)
    return np.concatenate([one.mask(at, values[at : at + step], Workspace()) for at in range(0, values.size, step)])


@pytest.mark.parametrize("shape", [(6,), (5, 7), (3, 4, 5), (2, 6, 3, 2), (3, 1), (2, 3, 0)])
def test_ranks_are_along_the_second_dimension(shape: tuple[int, ...]) -> None:
    """As mergekit sorts. Of equal magnitudes the earlier has the lower rank."""
    values = np.round(np.random.default_rng(9).standard_normal(shape, np.float32) * 2)
    rows = values if values.ndim > 1 else values[None]
    ranks = np.argsort(np.argsort(np.abs(rows), axis=1, kind="stable"), axis=1).astype(np.float32)
    ranks /= np.float32(max(rows.shape[1] - 1, 1))
    wanted = np.float32(0.5 - 0.2) + ranks * np.float32(2) * np.float32(0.2)
    one = ThinnedVector(Sparsity("ranked", 0.5, epsilon=0.2), values.size, rows_of(shape), Draws(0, 0, "w"))
    if values.size:
        assert np.array_equal(one.chances(values.reshape(-1), Workspace()), wanted.reshape(-1))


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
    for chance in (0.0, 2.0**-30, 0.3, 0.5, float(whole[7]), 1 - 2.0**-40):
        assert np.array_equal(Draws(1, 0, "w").below(chance, 5, 3000), whole[5:3005] < chance)
    for start, count in ((0, 7), (3, 100), (1024, 5), (3999, 1)):
        assert np.array_equal(Draws(1, 0, "w").uniform(start, count), whole[start : start + count])
    for other in (Draws(2, 0, "w"), Draws(1, 1, "w"), Draws(1, 0, "v")):
        assert abs(np.corrcoef(other.uniform(0, 4000), whole)[0, 1]) < 0.06
    assert abs(whole.mean() - 0.5) < 0.02 and whole.min() >= 0 and whole.max() < 1
    assert whole[:3].tolist() == [0.9285707473754883, 0.4764050841331482, 0.8778292536735535]  # for ever
