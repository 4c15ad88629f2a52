"""Merges task vectors, the differences of models to their base: task arithmetic, TIES, DARE, Breadcrumbs, DELLA.

Every step is rounded to F32 in the order in which mergekit, or PaddleFormers in its dialect, takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from holdfast_service.wings.merge.draws import Draws
from holdfast_service.wings.merge.norms import ScaleFactors
from holdfast_service.wings.merge.scanning import Block, Floats, Mask, Scan, Workspace
from holdfast_service.wings.merge.selection import COLLECTED_MAX, magnitude_bits
from holdfast_service.wings.merge.sparsifying import Sparsity, ThinnedVector, measured, rows_of

Rescale = Literal["l1", "density", "none"]
Dialect = Literal["mergekit", "paddle", "peft"]
Elect = Literal["sum", "count"]  # how the prevailing sign is found: of the sum, or of the number of models

_DIVISOR_MIN = 1e-8
_SAMPLE_BLOCKS, _SAMPLE_STEP = 4, 16  # a sample is every so many elements of some blocks


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
    elect: Elect = "sum"

    def begin(self, shape: tuple[int, ...]) -> TaskFormula:
        return TaskFormula(self, shape)


class TaskFormula:
    """The arithmetic of one tensor."""

    def __init__(self, terms: TaskTerms, shape: tuple[int, ...]) -> None:
        self._terms = terms
        ranked = any(one.how == "ranked" and one.density < 1 for one in terms.sparsities)
        rows = rows_of(shape)
        self.row = rows.elements if ranked else 1
        self._elements = prod(shape)
        collected_max = 4 * COLLECTED_MAX // max(len(terms.sparsities), 1)
        self._vectors = [
            ThinnedVector(one, self._elements, rows, Draws(terms.seed, number, terms.tensor), collected_max)
            for number, one in enumerate(terms.sparsities)
        ]
        thinned = [not one.all for one in self._vectors]
        self._scales = ScaleFactors(thinned, self._elements, terms.dialect) if terms.rescale == "l1" else None

    def prepare(self, scan: Scan) -> None:
        """Find the cuts, then the factors that keep the L1 norms."""
        self._find_cuts(scan)
        scales = self._scales
        if scales is None or all(one.all for one in self._vectors):
            return

        def measure(block: Block) -> list[Any]:
            deltas, space = self._deltas(block), block.space
            pairs = zip(self._vectors, deltas, strict=True)
            masks = [None if one.all else one.mask(block.start, delta, space) for one, delta in pairs]
            return scales.measure(deltas, masks, space)

        scales.find(scan, measure)

    def merge(self, block: Block) -> Floats:
        """base + the mixed remains of the models' task vectors."""
        terms, base = self._terms, block.values(block.inputs - 1, "base")
        if terms.consensus or terms.dialect == "paddle":
            weighted = [self._weighted(block, number, base, f"delta {number}") for number in range(block.inputs - 1)]
            if terms.dialect == "paddle":
                return np.asarray(_paddle_mixed(weighted, terms, block.space) + base)
            mixed = _agreed(weighted, terms, block.space)
        else:
            mixed = self._summed(block, base)
        if terms.scale != 1:
            mixed *= np.float32(terms.scale)
        mixed += base
        return mixed

    def _find_cuts(self, scan: Scan) -> None:
        if not any(one.selectors for one in self._vectors):
            return
        if scan.blocks > 1:
            self._predict(scan)
        while waiting := [one for vector in self._vectors for one in vector.waiting]:
            wanted = {one.wanted for one in waiting}
            numbers = None if None in wanted else sorted(number for number in wanted if number is not None)
            cuts = scan(lambda block: (block.number, measured(self._vectors, self._deltas(block), block)), numbers)
            for number, parts in cuts:
                concerned = [one for one in waiting if one.wanted in (None, number)]
                for one, part in zip(concerned, parts, strict=True):
                    one.add(number * scan.length, part)
            for one in waiting:
                one.end_scan()

    def _predict(self, scan: Scan) -> None:
        """Estimate the selectors' windows from some blocks."""
        count = min(_SAMPLE_BLOCKS, scan.blocks)
        numbers = sorted({number * (scan.blocks - 1) // max(count - 1, 1) for number in range(count)})
        samples = scan(lambda block: [magnitude_bits(one)[::_SAMPLE_STEP] for one in self._deltas(block)], numbers)
        for vector, parts in zip(self._vectors, zip(*samples, strict=True), strict=True):
            joined = np.sort(np.concatenate(parts))
            for one in vector.selectors:
                one.predict(joined)

    def _summed(self, block: Block, base: Floats) -> Floats:
        mixed = block.space.floats("mixed", block.size)
        for number in range(block.inputs - 1):
            weighted = self._weighted(block, number, base, "delta")
            np.add(weighted, np.float32(0) if not number else mixed, out=mixed)
        divisor = summed([np.float32(weight) for weight in self._terms.weights])
        if self._terms.normalize and not abs(divisor) < _DIVISOR_MIN:
            mixed /= divisor
        return mixed

    def _delta(self, block: Block, number: int, base: Floats, name: str) -> Floats:
        into = block.space.floats(name, block.size)
        floats: Floats = np.subtract(block.values(number), base, out=into)
        return floats

    def _deltas(self, block: Block) -> list[Floats]:
        base = block.values(block.inputs - 1, "base")
        return [self._delta(block, number, base, f"delta {number}") for number in range(block.inputs - 1)]

    def _weighted(self, block: Block, number: int, base: Floats, name: str) -> Floats:
        """A task vector's remaining elements, scaled and weighted."""
        vector, floats = self._vectors[number], self._delta(block, number, base, name)
        if not vector.all:
            chances = vector.chances(floats, block.space) if self._terms.rescale == "density" else None
            mask = None if self._scales is None else self._scales.kept_mask(number, block.start, block.size)
            np.multiply(floats, vector.mask(block.start, floats, block.space) if mask is None else mask, out=floats)
            factor = None if self._scales is None else self._scales.factor(number)
            if chances is not None:
                floats /= chances
            elif factor is not None:
                floats *= factor
        floats *= np.float32(self._terms.weights[number])
        return floats


def _agreed(weighted: Sequence[Floats], terms: TaskTerms, space: Workspace) -> Floats:
    """The sum of the elements that have the sign of the sum, or their weighted mean, in the workspace."""
    mixed = _sum(weighted, space.floats("mixed", weighted[0].size))
    inside = _agreeing(weighted, mixed, terms.elect)
    mixed = _sum([np.multiply(values, mask, out=values) for values, mask in zip(weighted, inside, strict=True)], mixed)
    if terms.normalize:
        divisors, part = (space.floats(name, mixed.size) for name in ("divisors", "part"))
        divisors[:] = 0
        for mask, weight in zip(inside, terms.weights, strict=True):
            divisors += np.multiply(mask, np.float32(weight), out=part)
        divisors += divisors == 0
        mixed /= divisors
    return mixed


def _paddle_mixed(weighted: Sequence[Floats], terms: TaskTerms, space: Workspace) -> Floats:
    """The same as PaddleFormers computes it, which divides by float64 and normalises weights beforehand."""
    mixed = _sum(weighted, space.floats("mixed", weighted[0].size))
    if not terms.consensus:
        return mixed
    inside = _agreeing(weighted, mixed, terms.elect)
    mixed = _sum([values * mask for values, mask in zip(weighted, inside, strict=True)], mixed)
    if terms.normalize:
        divisors = np.zeros(mixed.size, np.float64)
        for mask, weight in zip(inside, terms.weights, strict=True):
            divisors += mask * weight
        divisors[np.abs(divisors) < _DIVISOR_MIN] = 1
        mixed = (mixed / divisors).astype(np.float32)
    return mixed


def _agreeing(weighted: Sequence[Floats], together: Floats, elect: Elect) -> list[Mask]:
    """For each task vector, the elements that have the prevailing sign; the positive ones, if none prevails."""
    votes = together if elect == "sum" else np.sum([np.sign(values) for values in weighted], axis=0)
    positive = votes >= 0
    negative = ~positive
    return [(values > 0) & positive | (values < 0) & negative for values in weighted]


def _sum(values: Sequence[Floats], into: Floats) -> Floats:
    for number, one in enumerate(values):
        np.add(one, np.float32(0) if not number else into, out=into)
    return into


def summed(values: Sequence[np.float32]) -> np.float32:
    """The sum in F32, one after the other."""
    total = np.float32(0)
    for one in values:
        total = np.float32(total + one)
    return total
