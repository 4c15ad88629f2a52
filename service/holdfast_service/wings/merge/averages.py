"""Merges whole tensors: weighted means, spherical interpolation, and a model alone."""

from __future__ import annotations

from math import acos, fsum, prod, sin, sqrt
from typing import NamedTuple

import numpy as np

from holdfast_service.wings.merge.norms import PairwiseSum
from holdfast_service.wings.merge.scanning import Block, Floats, Scan, Workspace, total
from holdfast_service.wings.merge.task_vectors import Dialect, summed

_COLLINEAR = 0.9995  # beyond this cosine two tensors have one direction, and are interpolated linearly
_NORM_MIN = 1e-8
_Factors = tuple[np.float32, np.float32]


class MeanTerms(NamedTuple):
    """A weighted mean, or with `normalize` false a weighted sum."""

    weights: tuple[float, ...]
    normalize: bool
    dialect: Dialect = "mergekit"

    def begin(self, shape: tuple[int, ...]) -> MeanFormula:
        return MeanFormula(self)


class MeanFormula:
    """Σ w·x, divided by Σ w; PaddleFormers divides the weights instead, before they are rounded to F32."""

    row = 1

    def __init__(self, terms: MeanTerms) -> None:
        weights, before = terms.weights, terms.dialect == "paddle" and terms.normalize
        if before:
            weights = tuple(weight / sum(terms.weights) for weight in weights)
        self._weights = [np.float32(weight) for weight in weights]
        self._fused = terms.dialect == "mergekit"  # product and sum are rounded at once, as by torch's addcmul
        self._divisor = summed(self._weights) if terms.normalize and not before else None

    def prepare(self, scan: Scan) -> None:
        """Needs no scan."""

    def merge(self, block: Block) -> Floats:
        floats = block.space.floats("made", block.size)
        for number, weight in enumerate(self._weights):
            self._add(block.values(number), weight, floats, not number, block.space)
        if self._divisor is not None and self._divisor != 1:
            floats /= self._divisor
        return floats

    def _add(self, values: Floats, weight: np.float32, floats: Floats, first: bool, space: Workspace) -> None:
        if first:  # rounded once in any case; and 0 is added to make no negative zero
            np.multiply(values, weight, out=floats)
            floats += np.float32(0)
        elif weight == 1:
            floats += values
        elif self._fused:
            product, longer = (space.array(name, values.size, np.float64) for name in ("product", "longer"))
            np.copyto(product, values)
            product *= np.float64(weight)  # exact
            np.copyto(longer, floats)
            longer += product
            np.copyto(floats, longer, casting="same_kind")
        else:
            floats += np.multiply(values, weight, out=space.floats("product", values.size))


class SlerpTerms(NamedTuple):
    """Spherical interpolation from the base to the other model, by the share `t` of the way."""

    t: float
    dialect: Dialect = "mergekit"

    def begin(self, shape: tuple[int, ...]) -> SlerpFormula:
        return SlerpFormula(self, prod(shape))


class SlerpFormula:
    """s₀·base + s₁·other. Norms, cosine and both factors are computed in float64; in PaddleFormers' dialect only the norms,
    and the rest in F32 as numpy does it there.
    """

    row = 1

    def __init__(self, terms: SlerpTerms, elements: int) -> None:
        self._t, self._elements, self._paddle = terms.t, elements, terms.dialect == "paddle"
        self._factors = np.float32(1), np.float32(0)

    def prepare(self, scan: Scan) -> None:
        """Norms and dot product, by one scan, or two."""
        other, base, dot = map(fsum, zip(*scan(_products), strict=True))
        norms = [norm if (norm := sqrt(square)) > _NORM_MIN else 1.0 for square in (other, base)]
        self._factors = self._of_paddle(scan, norms) if self._paddle else self._found(dot / norms[0] / norms[1])

    def merge(self, block: Block) -> Floats:
        merged, part = (block.space.floats(name, block.size) for name in ("made", "part"))
        np.multiply(block.values(1), self._factors[0], out=merged)
        merged += np.multiply(block.values(0), self._factors[1], out=part)
        return merged

    def _found(self, cosine: float) -> _Factors:
        if not abs(cosine) <= _COLLINEAR:
            return self._straight()
        angle = acos(cosine)
        return np.float32(sin((1 - self._t) * angle) / sin(angle)), np.float32(sin(self._t * angle) / sin(angle))

    def _of_paddle(self, scan: Scan, norms: list[float]) -> _Factors:
        pairwise_sum = PairwiseSum(self._elements)
        for products in scan(
            lambda block: block.values(1) / np.float32(norms[1]) * (block.values(0) / np.float32(norms[0]))
        ):
            pairwise_sum.add(products)
        if not abs(pairwise_sum.value) <= _COLLINEAR:
            return self._straight()
        angle = np.arccos(pairwise_sum.value)
        turned = angle * np.float32(self._t)
        return np.sin(angle - turned) / np.sin(angle), np.sin(turned) / np.sin(angle)

    def _straight(self) -> _Factors:
        return np.float32(1) - np.float32(self._t), np.float32(self._t)


class AloneTerms(NamedTuple):
    """One model, with its adapter, times `scale`."""

    scale: float = 1.0

    def begin(self, shape: tuple[int, ...]) -> AloneFormula:
        return AloneFormula(self.scale)


class AloneFormula:
    """The one input, unchanged for a scale of 1."""

    row = 1

    def __init__(self, scale: float) -> None:
        self._scale = np.float32(scale)

    def prepare(self, scan: Scan) -> None:
        """Needs no scan."""

    def merge(self, block: Block) -> Floats:
        values = block.values(0)
        if self._scale == 1:
            return values
        return np.multiply(values, self._scale, out=block.space.floats("made", block.size))


def _products(block: Block) -> tuple[float, float, float]:
    """The squares of both inputs, and their products, summed in float64."""
    one, other, product = (block.space.array(name, block.size, np.float64) for name in ("one", "other", "product"))
    np.copyto(one, block.values(0))
    np.copyto(other, block.values(1))
    squares = [total(np.multiply(side, side, out=product)) for side in (one, other)]
    return squares[0], squares[1], total(np.multiply(one, other, out=product))
