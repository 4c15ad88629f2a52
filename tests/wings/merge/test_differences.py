"""Methods that look at differences to the base, by their formulas: of several blocks, and where nothing differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_service.wings.merge.differences import FusionTerms, NearTerms, RamTerms, SceTerms, StockTerms
from holdfast_service.wings.merge.scanning import Terms
from holdfast_service.wings.merge.sparsifying import Sparsity
from holdfast_service.wings.merge.task_vectors import TaskTerms
from tests.wings.merge.test_methods import computed

CHANCE = np.random.default_rng(4)


def near(count: int, *shape: int) -> list[NDArray[np.float32]]:
    """Models near a base, which is last."""
    base = CHANCE.standard_normal(shape, np.float32)
    return [*(base + np.float32(0.1) * CHANCE.standard_normal(shape, np.float32) for _ in range(count)), base]


ALL: dict[str, tuple[Terms, int]] = {
    "stock": (StockTerms(3), 3),
    "stock by rows": (StockTerms(3, filter_wise=True), 3),
    "sce": (SceTerms(2), 2),
    "sce of some": (SceTerms(3, 0.4), 3),
    "sce of none": (SceTerms(2, 0.0), 2),
    "ram": (RamTerms(3, 0.1), 3),
    "ramplus": (RamTerms(3, 0.1, 0.4, 0.7), 3),
    "nearswap": (NearTerms(0.02), 1),
    "fusion": (FusionTerms(), 1),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(900, 310), (300,), (4, 5, 6)])
def test_whatever_is_computed_at_once(name: str, shape: tuple[int, ...]) -> None:
    """Chunks change no bit, in tensors of any shape; equal models stay, but for what rounding moves."""
    terms, count = ALL[name]
    arrays = near(count, *shape)
    found = computed(terms, arrays)
    assert computed(terms, arrays, 1013).tobytes() == found.tobytes() and np.isfinite(found).all()
    same = computed(terms, [arrays[-1]] * (count + 1))
    assert np.abs(same - arrays[-1]).max() <= np.spacing(np.abs(arrays[-1]).max())


def test_fusion_takes_what_is_far_above_the_median() -> None:
    """By exact quartiles, of several blocks."""
    other, base = near(1, 900, 310)
    wide = [values.astype(np.float64) for values in (other, base)]
    shares = [np.exp(one) / np.exp(one).sum(axis=1, keepdims=True) + 1e-8 for one in wide]
    divergence = (shares[0] * np.log(shares[0] / shares[1])).sum(axis=1, keepdims=True)
    importance = np.abs(other - base) * divergence.astype(np.float32)
    ordered = np.sort(importance.ravel())
    low, middle, high = (ordered[int(share * (ordered.size - 1))] for share in (0.25, 0.5, 0.75))
    taken = computed(FusionTerms(), [other, base]) != base
    assert 0 < taken.mean() < 0.1
    assert (taken != (importance >= middle + np.float32(1.5) * (high - low))).mean() < 1e-4


def test_sce_takes_what_varies_most() -> None:
    """The share is of the elements that vary at all."""
    arrays = near(3, 500, 700)
    for one in arrays:
        one[:250] = arrays[-1][:250]
    variance = np.var(np.array(arrays[:-1], np.float64) - arrays[-1], axis=0)
    changed = computed(SceTerms(3, 0.2), arrays) != arrays[-1]
    least = np.sort(variance.ravel())[-int(0.2 * np.count_nonzero(variance))]
    assert not changed[:250].any() and (changed != (variance >= least)).mean() < 1e-3


def test_election_by_count() -> None:
    """Two small models of one sign outvote a large one of the other, unless the sum decides."""
    base = np.zeros((2, 2), np.float32)
    arrays: list[NDArray[Any]] = [base + np.float32(value) for value in (1, 1, -5)] + [base]
    sparsities = (Sparsity("none", 1.0),) * 3
    terms = TaskTerms("w", (1.0, 1.0, 1.0), sparsities, "none", True, True)
    assert computed(terms, arrays).tolist() == (base - 5).tolist()
    assert computed(terms._replace(elect="count"), arrays).tolist() == (base + 1).tolist()
    assert computed(terms._replace(elect="count", dialect="paddle"), arrays).tolist() == (base + 1).tolist()
