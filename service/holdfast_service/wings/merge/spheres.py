"""Interpolates on spheres: NuSLERP, Multi-SLERP and the Karcher mean.

What these methods compute is a sum of the models, or of their task vectors, with a factor each. The factors follow from the
products of all pairs, which one scan sums in float64; an iteration moves only factors, not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import acos, fsum, prod, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.merge.scanning import Block, Floats, Scan, total

Products = NDArray[np.float64]  # of each pair of vectors
Spread = tuple[Products, Products, Products]  # squares of both vectors and their products, row by row or column by column

_NORM_MIN, _SINE_MIN = 1e-7, 1e-16  # NuSLERP's


def vectors(block: Block, count: int) -> list[Floats]:
    """The models of a block, less the base if there is one behind them."""
    if block.inputs == count:
        return [block.values(number, f"model {number}") for number in range(count)]
    base = block.values(count, "base")
    return [
        np.subtract(block.values(number), base, out=block.space.floats(f"delta {number}", block.size))
        for number in range(count)
    ]


def products(scan: Scan, count: int) -> Products:
    """The products of all pairs of `count` vectors, by one scan."""

    def measure(block: Block) -> list[float]:
        found, space = vectors(block, count), block.space
        wide = [space.array(f"wide {number}", block.size, np.float64) for number in range(count)]
        for into, one in zip(wide, found, strict=True):
            np.copyto(into, one)
        part = space.array("product", block.size, np.float64)
        return [total(np.multiply(wide[i], wide[j], out=part)) for i in range(count) for j in range(i + 1)]

    sums = iter([fsum(parts) for parts in zip(*scan(measure), strict=True)])
    made = np.zeros((count, count))
    for i in range(count):
        for j in range(i + 1):
            made[i, j] = made[j, i] = next(sums)
    return made


def _with_base(block: Block, count: int, made: Floats) -> Floats:
    return made if block.inputs == count else np.add(made, block.values(count, "base"), out=made)


class SphereTerms(NamedTuple):
    """A mean on a sphere: Multi-SLERP with weights, or the Karcher mean with steps and a tolerance."""

    tensor: str
    models: int
    weights: tuple[float, ...] = ()  # none: the Karcher mean
    epsilon: float = 0.0
    steps: int = 0

    def begin(self, shape: tuple[int, ...]) -> SphereFormula:
        return SphereFormula(self)


class SphereFormula:
    """Σ fᵢ·xᵢ, with factors that follow from the products of the vectors."""

    row = 1

    def __init__(self, terms: SphereTerms) -> None:
        self._terms = terms
        self._factors = np.ones(terms.models, np.float32)

    def prepare(self, scan: Scan) -> None:
        """One scan; none for a model alone."""
        terms = self._terms
        if terms.models > 1:
            pairs = products(scan, terms.models)
            found = barycentric(pairs, terms) if terms.weights else karcher(pairs, terms.steps, terms.epsilon)
            self._factors = found.astype(np.float32)

    def merge(self, block: Block) -> Floats:
        count = self._terms.models
        if count == 1:
            return block.values(0)
        made, part = (block.space.floats(name, block.size) for name in ("made", "part"))
        for number, one in enumerate(vectors(block, count)):
            np.multiply(one, self._factors[number], out=part)
            np.add(part, np.float32(0) if not number else made, out=made)
        return _with_base(block, count, made)


def barycentric(pairs: Products, terms: SphereTerms) -> Products:
    """Factors of Multi-SLERP: from the weighted mean of unit vectors, along the mean of the tangents there.

    `StateMismatch` by tensor if the mean is zero, and so has no direction.
    """
    weights, norms = np.array(terms.weights), np.sqrt(np.diag(pairs))
    units = 1 / (norms + terms.epsilon)
    angles = pairs * units * units[:, None]
    length = sqrt(max(float(weights @ angles @ weights), 0.0))
    if length < terms.epsilon:
        if len(weights) == 2:
            return weights
        raise StateMismatch(
            f"the weighted mean of tensor {terms.tensor!r} is zero, so multislerp has no direction",
            hint="change the weights, or use the method linear",
            tensor=terms.tensor,
        )
    mean = weights / length
    tangent = weights - (weights @ angles @ mean) * mean
    angle = sqrt(max(float(tangent @ angles @ tangent), 0.0)) + terms.epsilon
    made: Products = (mean * np.cos(angle) + tangent * (np.sin(angle) / angle)) * (norms @ weights) * units
    return made


def karcher(pairs: Products, steps: int, tolerance: float) -> Products:
    """Factors of the Karcher mean of equal weights, times the mean norm; vectors of almost no length do not turn it."""
    count, norms = len(pairs), np.sqrt(np.diag(pairs))
    valid = norms > tolerance
    if not valid.any():
        return np.zeros(count)
    units = np.where(valid, 1 / np.where(valid, norms, 1), 0)
    angles = pairs * units * units[:, None]
    share = valid / valid.sum()

    def norm(factors: Products) -> float:
        return sqrt(max(float(factors @ angles @ factors), 0.0))

    length = norm(share)
    mean: Products = share / length if length >= tolerance else np.eye(count)[np.argmax(valid)]
    for _ in range(steps):
        tangent = np.zeros(count)
        for number in np.flatnonzero(valid):
            dot = float(np.clip(angles[number] @ mean, -1, 1))
            angle = acos(dot)
            if angle >= tolerance:
                tangent += share[number] * (angle / np.sin(angle)) * (np.eye(count)[number] - dot * mean)
        length = norm(tangent)
        if length < tolerance:
            break
        mean = np.cos(length) * mean + np.sin(length) * (tangent / length)
        again = norm(mean)
        mean = mean / again if again > tolerance else mean
    made: Products = norms.mean() * mean * units
    return made


class NuSlerpTerms(NamedTuple):
    """Spherical interpolation of two models, or of their task vectors: as a whole, or along rows or columns."""

    t: float
    along: str = "all"

    def begin(self, shape: tuple[int, ...]) -> NuSlerpFormula:
        return NuSlerpFormula(self, shape)


class NuSlerpFormula:
    """(sin((1 - t)·θ)·x₀ + sin(t·θ)·x₁) / sin θ, with the angle of the whole tensors, of their rows, or of their columns."""

    def __init__(self, terms: NuSlerpTerms, shape: tuple[int, ...]) -> None:
        self._t, self._along = terms.t, terms.along if len(shape) > 1 or terms.along == "all" else "rows"
        sizes = {"all": 1, "rows": prod(shape[-1:]), "columns": prod(shape[1:])}
        self.row = max(sizes[self._along], 1)
        self._factors: _Factors | None = None

    def prepare(self, scan: Scan) -> None:
        """One scan, unless rows are apart."""
        if self._along == "all":
            pairs = products(scan, 2)
            self._factors = _factors(self._t, (pairs[0, 0], pairs[1, 1], pairs[0, 1]))
        elif self._along == "columns":
            sums = [np.zeros(self.row) for _ in range(3)]
            for parts in scan(lambda block: self._spread(block, 0)):
                for into, part in zip(sums, parts, strict=True):
                    into += part
            self._factors = _factors(self._t, (sums[0], sums[1], sums[2]))

    def merge(self, block: Block) -> Floats:
        factors = self._factors
        if factors is None:
            spread = self._spread(block, 1)
            factors = _factors(self._t, (spread[0][:, None], spread[1][:, None], spread[2][:, None]))
        one, other = (values.reshape(-1, self.row) for values in vectors(block, 2))
        made, part = (block.space.floats(name, block.size).reshape(-1, self.row) for name in ("made", "part"))
        np.multiply(one, factors[0], out=made)
        made += np.multiply(other, factors[1], out=part)
        made /= factors[2]
        return _with_base(block, 2, made.reshape(-1))

    def _spread(self, block: Block, axis: int) -> Spread:
        one, other = (values.reshape(-1, self.row).astype(np.float64) for values in vectors(block, 2))
        sums = [np.sum(values, axis=axis) for values in (one * one, other * other, one * other)]
        return sums[0], sums[1], sums[2]


_Factors = tuple[Floats, Floats, Floats]


def _factors(t: float, sums: Sequence[Products | float]) -> _Factors:
    """What both vectors are multiplied with, and what their sum is divided by."""
    squares, others, dots = (np.asarray(one, np.float64) for one in sums)
    norms = np.maximum(np.sqrt(squares), _NORM_MIN) * np.maximum(np.sqrt(others), _NORM_MIN)
    cosine = np.clip(dots / norms, -1, 1)
    straight = 1 - cosine**2 <= _SINE_MIN
    angle = np.arccos(np.where(straight, 0, cosine))
    made = [
        np.where(straight, 1 - t, np.sin((1 - t) * angle)),
        np.where(straight, t, np.sin(t * angle)),
        np.where(straight, 1, np.sin(angle)),
    ]
    return made[0].astype(np.float32), made[1].astype(np.float32), made[2].astype(np.float32)
