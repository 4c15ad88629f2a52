"""Interpolations on spheres, by their formulas: of several blocks, of vectors, and where nothing can be turned."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.spheres import NuSlerpTerms, SphereTerms
from tests.wings.merge.test_methods import computed

CHANCE = np.random.default_rng(3)


def some(*shape: int, count: int = 2) -> list[NDArray[np.float32]]:
    return [CHANCE.standard_normal(shape, np.float32) for _ in range(count)]


def turned(one: NDArray[np.float64], other: NDArray[np.float64], t: float) -> NDArray[np.float64]:
    """By the formula, of vectors."""
    angle = np.arccos(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    made: NDArray[np.float64] = (np.sin((1 - t) * angle) * one + np.sin(t * angle) * other) / np.sin(angle)
    return made


def test_nuslerp_of_whole_tensors() -> None:
    """Of more than one block, and bit by bit the same in chunks."""
    one, other = some(700, 500)
    found = computed(NuSlerpTerms(0.3), [one, other])
    wanted = turned(one.ravel().astype(np.float64), other.ravel().astype(np.float64), 0.3).reshape(one.shape)
    assert np.abs(found - wanted).max() < 1e-6
    assert computed(NuSlerpTerms(0.3), [one, other], 5000).tobytes() == found.tobytes()


@pytest.mark.parametrize(("along", "axis"), [("rows", 1), ("columns", 0)])
def test_nuslerp_of_rows_and_columns(along: str, axis: int) -> None:
    one, other, base = some(900, 310, count=3)
    found = computed(NuSlerpTerms(0.7, along), [one, other, base])
    sides = [np.moveaxis(side.astype(np.float64) - base, axis, 1) for side in (one, other)]
    wanted = np.array([turned(first, second, 0.7) for first, second in zip(*sides, strict=True)])
    assert np.abs(found - base - np.moveaxis(wanted, 1, axis)).max() < 1e-5


@pytest.mark.parametrize("along", ["all", "rows", "columns"])
def test_nuslerp_of_vectors(along: str) -> None:
    """They are one row; equal ones are interpolated on the straight line."""
    one, other = some(300)
    found = computed(NuSlerpTerms(0.2, along), [one, other])
    assert np.abs(found - turned(one.astype(np.float64), other.astype(np.float64), 0.2)).max() < 1e-6
    assert np.abs(computed(NuSlerpTerms(0.2, along), [one, one * 2]) - one * np.float32(1.2)).max() < 1e-6


def test_karcher() -> None:
    """Of two tensors it is the middle of the arc, with the mean norm; zeros do not turn it; a model alone stays."""
    one, other = some(40, 30)
    norms = [float(np.linalg.norm(side.astype(np.float64))) for side in (one, other)]
    sides = [side.ravel().astype(np.float64) / norm for side, norm in zip((one, other), norms, strict=True)]
    middle = turned(sides[0], sides[1], 0.5).reshape(one.shape)
    found = computed(SphereTerms("w", 2, epsilon=1e-9, steps=50), [one, other])
    assert np.abs(found - middle * np.mean(norms)).max() < 1e-6
    zeros = np.zeros_like(one)
    found = computed(SphereTerms("w", 2, epsilon=1e-9, steps=50), [one, zeros])
    assert np.abs(found - one / 2).max() < 1e-6
    assert not computed(SphereTerms("w", 2, epsilon=1e-9, steps=5), [zeros, zeros]).any()
    assert computed(SphereTerms("w", 1, epsilon=1e-9, steps=5), [one]).tobytes() == one.tobytes()


def test_multislerp_without_a_direction() -> None:
    """Opposed models: two are interpolated on the line, three are refused by the tensor's name."""
    (one,) = some(8, 8, count=1)
    found = computed(SphereTerms("w", 2, (0.5, 0.5), 1e-5), [one, -one])
    assert not found.any()
    with pytest.raises(StateMismatch, match="'w' is zero"):
        computed(SphereTerms("w", 3, (0.5, 0.25, 0.25), 1e-5), [one, -one, -one])
