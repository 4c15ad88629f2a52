"""Merges task vectors, the differences of models to their base: task arithmetic, TIES, DARE, Breadcrumbs, DELLA.

Every step is rounded to F32 in the order in which mergekit, or PaddleFormers in its dialect, takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from holdfast_service.daemon.merging.draws import Draws
from holdfast_service.daemon.merging.norms import PairwiseSum, PlainSum, RunningSum
from holdfast_service.daemon.merging.scanning import Block, Floats, Mask, Scan
from holdfast_service.daemon.merging.sparsifying import Sparsity, ThinnedVector

Rescale = Literal["l1", "density", "none"]
Dialect = Literal["mergekit", "paddle"]

_NORM_MIN = {"mergekit": 1e-7, "paddle": 1e-8}
_DIVISOR_MIN = 1e-8


class TaskTerms(NamedTuple):
    """A merge of task vectors, of one tensor. `weights` and `sparsities` are in the order of the models."""

    tensor: str
    weights: tuple[float, ...]
    sparsities: tuple[Sparsity, ...]
    rescale: Rescale
    consensus: bool  # only elements of the sign that prevails
    normalize: bool
    scale: float = 1.0
    seed: int = 0
    dialect: Dialect = "mergekit"

    def begin(self, shape: tuple[int, ...]) -> TaskFormula:
        return TaskFormula(self, shape)


class TaskFormula:
    """The arithmetic of one tensor."""

    def __init__(self, terms: TaskTerms, shape: tuple[int, ...]) -> None:
        self._terms = terms
        ranked = any(one.how == "ranked" and one.density < 1 for one in terms.sparsities)
        self.row = max(shape[-1], 1) if ranked and shape else 1
        elements = prod(shape)
        self._elements = elements
        self._kept = [
            ThinnedVector(one, elements, self.row, Draws(terms.seed, number, terms.tensor))
            for number, one in enumerate(terms.sparsities)
        ]
        self._factors: list[np.float32 | None] = [None] * len(self._kept)

    def prepare(self, scan: Scan) -> None:
        """Find the cuts, then the factors that keep the L1 norms."""
        while not all(one.ready for one in self._kept):
            for block in scan():
                for kept, delta in zip(self._kept, self._deltas(block), strict=True):
                    if not kept.ready:
                        kept.feed(block.start, delta)
            for kept in self._kept:
                kept.end_scan()
        if self._terms.rescale == "l1" and not all(one.all for one in self._kept):
            self._find_factors(scan)

    def merge(self, block: Block) -> Floats:
        """base + what is left of the models' task vectors, mixed."""
        terms, base = self._terms, block.values[-1]
        weighted = []
        for number, (delta, weight) in enumerate(zip(self._deltas(block), terms.weights, strict=True)):
            weighted.append(self._thinned(number, block.start, delta) * np.float32(weight))
        if terms.dialect == "paddle":
            return _paddle_mixed(weighted, terms) + base
        mixed, divisor = _mixed(weighted, terms)
        if terms.normalize:
            mixed /= divisor
        if terms.scale != 1:
            mixed *= np.float32(terms.scale)
        return base + mixed

    def _deltas(self, block: Block) -> list[Floats]:
        return [values - block.values[-1] for values in block.values[:-1]]

    def _find_factors(self, scan: Scan) -> None:
        before, after = ([self._sum() for _ in self._kept] for _ in range(2))
        for block in scan():
            for number, (kept, delta) in enumerate(zip(self._kept, self._deltas(block), strict=True)):
                if not kept.all:
                    magnitudes = np.abs(delta)
                    before[number].add(magnitudes)
                    after[number].add(magnitudes * kept.mask(block.start, delta))
        least = _NORM_MIN[self._terms.dialect]
        for number, kept in enumerate(self._kept):
            if not kept.all and min(before[number].value, after[number].value) >= least:
                self._factors[number] = np.float32(before[number].value / after[number].value)

    def _sum(self) -> RunningSum:
        return PairwiseSum(self._elements) if self._terms.dialect == "paddle" else PlainSum()

    def _thinned(self, number: int, start: int, delta: Floats) -> Floats:
        kept, factor = self._kept[number], self._factors[number]
        if kept.all:
            return delta
        left: Floats = delta * kept.mask(start, delta)
        if self._terms.rescale == "density":
            left /= kept.chances(delta) if isinstance(kept.chances(delta), np.ndarray) else np.float32(kept.chances(delta))
        elif factor is not None:
            left *= factor
        return left


def _mixed(weighted: Sequence[Floats], terms: TaskTerms) -> tuple[Floats, Floats | np.float32]:
    """The sum of the weighted task vectors, and what it is divided by to be their mean."""
    weights = [np.float32(weight) for weight in terms.weights]
    if not terms.consensus:
        divisor = summed(weights)
        return _sum(weighted), np.float32(1) if abs(divisor) < _DIVISOR_MIN else divisor
    inside = _agreeing(weighted)
    divisors = np.zeros_like(weighted[0])
    mixed = np.zeros_like(weighted[0])
    for values, weight, mask in zip(weighted, weights, inside, strict=True):
        mixed += values * mask
        divisors += weight * mask
    divisors[divisors == 0] = 1
    return mixed, divisors


def _paddle_mixed(weighted: Sequence[Floats], terms: TaskTerms) -> Floats:
    """The same as PaddleFormers computes it, which divides by float64 and normalises weights beforehand."""
    if not terms.consensus:
        return _sum(weighted)
    inside = _agreeing(weighted)
    mixed = _sum([values * mask for values, mask in zip(weighted, inside, strict=True)])
    if terms.normalize:
        divisors = np.zeros(mixed.size, np.float64)
        for mask, weight in zip(inside, terms.weights, strict=True):
            divisors += mask * weight
        divisors[np.abs(divisors) < _DIVISOR_MIN] = 1
        mixed = (mixed / divisors).astype(np.float32)
    return mixed


def _agreeing(weighted: Sequence[Floats]) -> list[Mask]:
    """Of each task vector, the elements that have the sign of the sum; where that is zero, the positive ones."""
    positive = _sum(weighted) >= 0
    return [np.where(positive, values > 0, values < 0) for values in weighted]


def _sum(values: Sequence[Floats]) -> Floats:
    made = np.zeros_like(values[0])
    for one in values:
        made += one
    return made


def summed(values: Sequence[np.float32]) -> np.float32:
    """The sum in F32, one after the other."""
    made = np.float32(0)
    for one in values:
        made = np.float32(made + one)
    return made
