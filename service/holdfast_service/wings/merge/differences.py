"""Methods that decide by differences to the base: Model Stock, SCE, RAM, NearSwap, Arcee Fusion, in mergekit's order.

What follows from a whole tensor, or a whole row, is summed in float64. Arcee Fusion's quartiles are exact: mergekit takes
them of a random sample where a tensor has over a million elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import fsum, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.wings.merge.scanning import Block, Floats, Mask, Scan, total
from holdfast_service.wings.merge.selection import Bits, Selector, magnitude_bits
from holdfast_service.wings.merge.spheres import products, vectors

_PRODUCT_MIN, _SINGULAR = 1e-6, 1e-6  # Model Stock's
_SHARES_MIN = 1e-6  # SCE's
_ALONE_MIN = np.float32(1e-5)  # RAM's, for a model of which others have changed every element
_NEAR_MIN = np.float32(1e-6)
_QUARTILES = (0.25, 0.5, 0.75)
_LEAST = 1e-8  # what Arcee Fusion adds to a share


def find_cuts(selectors: Sequence[Selector], scan: Scan, values: Callable[[Block], Floats]) -> None:
    """Scan the values of a whole tensor until the selectors have their elements."""

    def measure(block: Block) -> tuple[int, list[object]]:
        bits: Bits = magnitude_bits(values(block))
        return block.number, [one.measure(bits) for one in waiting if one.wanted in (None, block.number)]

    while waiting := [one for one in selectors if not one.ready]:
        named = {one.wanted for one in waiting}
        numbers = None if None in named else sorted(number for number in named if number is not None)
        for number, parts in scan(measure, numbers):
            concerned = [one for one in waiting if one.wanted in (None, number)]
            for one, part in zip(concerned, parts, strict=True):
                one.add(number * scan.length, part)
        for one in waiting:
            one.end_scan()


class StockTerms(NamedTuple):
    """Model Stock: the way from the base to the mean that the angles between task vectors allow."""

    models: int
    filter_wise: bool = False

    def begin(self, shape: tuple[int, ...]) -> StockFormula:
        return StockFormula(self, shape)


class StockFormula:
    """t·mean + (1 - t)·base, with one t for the tensor or for each row."""

    def __init__(self, terms: StockTerms, shape: tuple[int, ...]) -> None:
        self._count, self._rows = terms.models, terms.filter_wise
        self.row = max(prod(shape[-1:]), 1) if terms.filter_wise else 1
        self._share: NDArray[np.float32] | None = None

    def prepare(self, scan: Scan) -> None:
        if not self._rows:
            self._share = _stock_share(products(scan, self._count)[:, :, None], self._count)

    def merge(self, block: Block) -> Floats:
        count, share = self._count, self._share
        if share is None:
            wide = [one.reshape(-1, self.row).astype(np.float64) for one in vectors(block, count)]
            pairs = np.array([[np.sum(one * other, axis=1) for other in wide] for one in wide])
            share = _stock_share(pairs, count)[:, None]
        mean, base = block.space.floats("made", block.size), block.values(count, "base")
        for number in range(count):
            np.add(block.values(number), np.float32(0) if not number else mean, out=mean)
        mean /= np.float32(count)
        rows, part = mean.reshape(-1, self.row), block.space.floats("part", block.size).reshape(-1, self.row)
        rows *= share
        rows += np.multiply(base.reshape(-1, self.row), np.float32(1) - share, out=part)
        return mean


def _stock_share(pairs: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """The way to go, of products of all pairs for each row."""
    norms = np.sqrt(np.array([pairs[number, number] for number in range(count)]))
    cosines = [
        np.clip(pairs[i, j] / np.maximum(norms[i] * norms[j], _PRODUCT_MIN), -1, 1) for i, j in combinations(range(count), 2)
    ]
    cosine = np.mean(cosines, axis=0)
    divisor = 1 + (count - 1) * cosine
    singular = np.abs(divisor) < _SINGULAR
    share: NDArray[np.float32] = np.where(singular, 0, count * cosine / np.where(singular, 1, divisor)).astype(np.float32)
    return share


class SceTerms(NamedTuple):
    """SCE: elements whose variance among the models is largest, weighted by each model's squares, of one sign."""

    models: int
    select: float = 1.0

    def begin(self, shape: tuple[int, ...]) -> SceFormula:
        return SceFormula(self, prod(shape))


class SceFormula:
    """base + Σ wᵢ·mᵢ·δᵢ / Σ wᵢ·mᵢ, where mᵢ says which elements have the sign of the sum."""

    row = 1

    def __init__(self, terms: SceTerms, elements: int) -> None:
        self._count, self._select, self._elements = terms.models, terms.select, elements
        self._selector: Selector | None = None
        self._nothing = terms.select <= 0
        self._weights = [np.float32(1)] * terms.models

    def prepare(self, scan: Scan) -> None:
        """Find the elements, then the weights of the models."""
        if 0 < self._select < 1:
            varying = sum(scan(lambda block: int(np.count_nonzero(self._variance(block)))))
            wanted = int(varying * self._select)
            self._nothing = not wanted
            if wanted:
                self._selector = Selector(wanted, True, self._elements)
                find_cuts([self._selector], scan, self._variance)

        def measure(block: Block) -> list[float]:
            return [total(one.astype(np.float64) ** 2) for one in self._chosen(block)]

        squares = [fsum(parts) / self._elements for parts in zip(*scan(measure), strict=True)]
        together = float(np.float32(sum(squares)))
        if abs(together) < _SHARES_MIN:
            self._weights = [np.float32(1 / self._count)] * self._count
        else:
            self._weights = [np.float32(one) / np.float32(together) for one in squares]

    def merge(self, block: Block) -> Floats:
        chosen, base = self._chosen(block), block.values(self._count, "base")
        together, weights = np.zeros(block.size, np.float32), np.zeros(block.size, np.float32)
        for one in chosen:
            together += one
        positive, made = together >= 0, np.zeros(block.size, np.float32)
        for one, weight in zip(chosen, self._weights, strict=True):
            share = weight * np.where(positive, one > 0, one < 0).astype(np.float32)
            made += one * share
            weights += share
        made /= np.maximum(weights, np.float32(_SHARES_MIN))
        made += base
        return made

    def _variance(self, block: Block) -> Floats:
        """Of each element among the models, computed in float64, as torch does."""
        wide = np.array(vectors(block, self._count), np.float64)
        variance: Floats = np.var(wide, axis=0).astype(np.float32)
        return variance

    def _chosen(self, block: Block) -> list[Floats]:
        found = vectors(block, self._count)
        if self._nothing:
            return [np.multiply(one, np.float32(0)) for one in found]
        if self._selector is None:
            return found
        cut = self._selector.cut
        assert cut is not None
        mask: Mask = cut.largest(magnitude_bits(self._variance(block)), block.start)
        return [one * mask for one in found]


class RamTerms(NamedTuple):
    """RAM: differences of one model alone as they are, those of several averaged; at most `epsilon` is no difference.

    With `r`, what a model alone has changed grows by up to r·alpha, the more of its elements others have changed, too.
    """

    models: int
    epsilon: float
    r: float = 0.0
    alpha: float = 0.0

    def begin(self, shape: tuple[int, ...]) -> RamFormula:
        return RamFormula(self)


class RamFormula:
    """base + Σ δᵢ·λᵢ of elements that one model changes, and Σ δᵢ / n of those that n change."""

    row = 1

    def __init__(self, terms: RamTerms) -> None:
        self._count, self._least = terms.models, np.float32(terms.epsilon)
        self._r, self._alpha = np.float32(terms.r), np.float32(terms.alpha)
        self._scales = [np.float32(1)] * terms.models

    def prepare(self, scan: Scan) -> None:
        """Count each model's changes, alone and with others."""
        if not self._r:
            return

        def measure(block: Block) -> list[tuple[int, int]]:
            changed = [np.abs(one) > self._least for one in vectors(block, self._count)]
            several = np.sum(changed, axis=0, dtype=np.int32) > 1
            shared = [int(np.count_nonzero(one & several)) for one in changed]
            return [(both, int(np.count_nonzero(one)) - both) for one, both in zip(changed, shared, strict=True)]

        for number, counts in enumerate(zip(*scan(measure), strict=True)):
            shared, alone = (np.float32(sum(part)) for part in zip(*counts, strict=True))
            share = np.minimum(shared / np.maximum(alone, _ALONE_MIN), self._alpha)
            self._scales[number] = np.float32(1) + self._r * share

    def merge(self, block: Block) -> Floats:
        found = vectors(block, self._count)
        changed = [np.abs(one) > self._least for one in found]
        changing = np.sum(changed, axis=0, dtype=np.int32)
        alone, divisor = changing == 1, np.maximum(changing, 1).astype(np.float32)
        made = np.zeros(block.size, np.float32)
        for one, mask, scale in zip(found, changed, self._scales, strict=True):
            made += np.where(mask, np.where(alone, one * scale, one / divisor), np.float32(0))
        made += block.values(self._count, "base")
        return made


class NearTerms(NamedTuple):
    """NearSwap: the other model where it is nearer to the base than `t`, and less of it where it is farther."""

    t: float

    def begin(self, shape: tuple[int, ...]) -> NearFormula:
        return NearFormula(self)


class NearFormula:
    """w·other + (1 - w)·base, with w = t / |base - other| between 0 and 1."""

    row = 1

    def __init__(self, terms: NearTerms) -> None:
        self._t = np.float32(terms.t)

    def prepare(self, scan: Scan) -> None:
        """Needs no scan."""

    def merge(self, block: Block) -> Floats:
        base, other = block.values(1, "base"), block.values(0)
        share = np.maximum(np.abs(base - other), _NEAR_MIN)
        share = np.clip((np.float32(1) / share) * self._t, np.float32(0), np.float32(1))
        made: Floats = share * other + (np.float32(1) - share) * base
        return made


class FusionTerms(NamedTuple):
    """Arcee Fusion: the other model's elements that matter most."""

    def begin(self, shape: tuple[int, ...]) -> FusionFormula:
        return FusionFormula(shape)


class FusionFormula:
    """The other model where |difference| · divergence of the row is far above the median, by the quartiles."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._elements, self.row = prod(shape), max(prod(shape[-1:]), 1)
        self._threshold = np.float32(0)

    def prepare(self, scan: Scan) -> None:
        """Find the quartiles."""
        selectors = [Selector(int(share * (self._elements - 1)) + 1, False, self._elements) for share in _QUARTILES]
        find_cuts(selectors, scan, self._importance)
        low, middle, high = (one.cut.magnitude for one in selectors if one.cut is not None)
        self._threshold = np.float32(middle + np.float32(1.5) * (high - low))

    def merge(self, block: Block) -> Floats:
        base = block.values(1, "base")
        made: Floats = np.subtract(block.values(0), base) * (self._importance(block) >= self._threshold)
        made += base
        return made

    def _importance(self, block: Block) -> Floats:
        """At least 0: a divergence below is one that was rounded."""
        base, other = (values.reshape(-1, self.row) for values in (block.values(1, "base"), block.values(0)))
        shares = [_shares(values) for values in (other, base)]
        divergence = np.sum(shares[0] * np.log(shares[0] / shares[1]), axis=1, keepdims=True)
        importance: Floats = np.abs(other - base) * np.maximum(divergence, 0).astype(np.float32)
        return importance.reshape(-1)


def _shares(values: Floats) -> NDArray[np.float64]:
    """The softmax of each row."""
    raised = np.exp(values.astype(np.float64) - values.max(axis=1, keepdims=True))
    made: NDArray[np.float64] = raised / raised.sum(axis=1, keepdims=True) + _LEAST
    return made
