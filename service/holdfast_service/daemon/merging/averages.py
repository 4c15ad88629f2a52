"""Merges whole tensors: weighted means, spherical interpolation, and a model alone."""

from __future__ import annotations

from math import acos, prod, sin, sqrt
from typing import NamedTuple

import numpy as np

from holdfast_service.daemon.merging.norms import PairwiseSum
from holdfast_service.daemon.merging.scanning import Block, Floats, Scan, total
from holdfast_service.daemon.merging.task_vectors import Dialect, summed

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
        """There is nothing to find out."""

    def merge(self, block: Block) -> Floats:
        made = np.zeros_like(block.values[0])
        for values, weight in zip(block.values, self._weights, strict=True):
            if self._fused:
                made[:] = made.astype(np.float64) + values.astype(np.float64) * np.float64(weight)
            else:
                made += values * weight
        if self._divisor is not None:
            made /= self._divisor
        return made


class SlerpTerms(NamedTuple):
    """Spherical interpolation from the base to the other model, by the share `t` of the way."""

    t: float
    dialect: Dialect = "mergekit"

    def begin(self, shape: tuple[int, ...]) -> SlerpFormula:
        return SlerpFormula(self, prod(shape))


class SlerpFormula:
    """s₀·base + s₁·other. Norms, cosine and both factors are computed in float64; in PaddleFormers' dialect the norms
    alone, and the rest in F32 as numpy does it there.
    """

    row = 1

    def __init__(self, terms: SlerpTerms, elements: int) -> None:
        self._t, self._elements, self._paddle = terms.t, elements, terms.dialect == "paddle"
        self._factors = np.float32(1), np.float32(0)

    def prepare(self, scan: Scan) -> None:
        """Norms and dot product, by one scan, or two."""
        squares, dot = [0.0, 0.0], 0.0
        for block in scan():
            pair = [values.astype(np.float64) for values in block.values]
            squares = [square + total(values * values) for square, values in zip(squares, pair, strict=True)]
            dot += total(pair[0] * pair[1])
        norms = [norm if (norm := sqrt(square)) > _NORM_MIN else 1.0 for square in squares]
        self._factors = self._of_paddle(scan, norms) if self._paddle else self._found(dot / norms[0] / norms[1])

    def merge(self, block: Block) -> Floats:
        other, base = block.values
        return base * self._factors[0] + other * self._factors[1]

    def _found(self, cosine: float) -> _Factors:
        if not abs(cosine) <= _COLLINEAR:
            return self._straight()
        angle = acos(cosine)
        return np.float32(sin((1 - self._t) * angle) / sin(angle)), np.float32(sin(self._t * angle) / sin(angle))

    def _of_paddle(self, scan: Scan, norms: list[float]) -> _Factors:
        found = PairwiseSum(self._elements)
        for block in scan():
            other, base = (values / np.float32(norm) for values, norm in zip(block.values, norms, strict=True))
            found.add(base * other)
        if not abs(found.value) <= _COLLINEAR:
            return self._straight()
        angle = np.arccos(found.value)
        turned = angle * np.float32(self._t)
        return np.sin(angle - turned) / np.sin(angle), np.sin(turned) / np.sin(angle)

    def _straight(self) -> _Factors:
        return np.float32(1) - np.float32(self._t), np.float32(self._t)


class AloneTerms(NamedTuple):
    """A model as it is, with its adapter."""

    def begin(self, shape: tuple[int, ...]) -> AloneFormula:
        return AloneFormula()


class AloneFormula:
    """The one input."""

    row = 1

    def prepare(self, scan: Scan) -> None:
        """There is nothing to find out."""

    def merge(self, block: Block) -> Floats:
        return block.values[0]
