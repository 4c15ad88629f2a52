"""What an adapter changes of a weight: W + s·B·A, DoRA's length of rows, biases, rows of tokens.

Everything is computed in float64, in a fixed order, and rounded to F32 once, so no box changes a bit.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.mapping.box_moves import BoxMove, drawn
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box, whole

Doubles = NDArray[np.float64]
View = Literal["plain", "turned", "experts", "experts turned"]
_NORM_ELEMENTS = 2**20  # of a weight's rows that are held at once while lengths of columns are summed


class Product(NamedTuple):
    """s·B·A in the shape of a weight. `view` is how its dimensions lie there: [out, in …], [in, out], [expert, out, in], or
    [expert, in, out]; experts are the rows of A in turn, and the last factor of B's columns.
    """

    low: ForeignTensor  # A, [experts · rank, in …]
    high: ForeignTensor  # B, [out, rank · experts]
    scale: float
    view: View = "plain"
    experts: int = 1

    @property
    def rank(self) -> int:
        return self.low.spec.shape[0] // self.experts

    def part(self, box: Box, fetch: FetchBox) -> Doubles:
        """A box of the product."""
        if self.view == "plain":
            low = self._low(fetch, 0, Box(box.offset[1:], box.shape[1:]))
            made = _summed(self._high(fetch, box.offset[0], box.shape[0], 0), low)
        elif self.view == "turned":
            low = self._low(fetch, 0, Box(box.offset[:1], box.shape[:1]))
            made = _summed(low.T, self._high(fetch, box.offset[1], box.shape[1], 0).T)
        else:
            made = np.stack([self._of_expert(expert, box, fetch) for expert in range(box.offset[0], box.stop[0])])
        made *= self.scale
        return made.reshape(box.shape)

    def _of_expert(self, expert: int, box: Box, fetch: FetchBox) -> Doubles:
        (_, row, column), (_, rows, columns) = box.offset, box.shape
        if self.view == "experts":
            low = self._low(fetch, expert, Box((column,), (columns,)))
            return _summed(self._high(fetch, row, rows, expert), low)
        low = self._low(fetch, expert, Box((row,), (rows,)))
        return _summed(low.T, self._high(fetch, column, columns, expert).T)

    def _low(self, fetch: FetchBox, expert: int, box: Box) -> Doubles:
        taken = Box((expert * self.rank, *box.offset), (self.rank, *box.shape))
        return fetch(self.low, taken).astype(np.float64).reshape(self.rank, -1)

    def _high(self, fetch: FetchBox, row: int, rows: int, expert: int) -> Doubles:
        shape = self.high.spec.shape
        taken = Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        return fetch(self.high, taken).astype(np.float64).reshape(rows, -1)[:, expert :: self.experts]


def _summed(left: Doubles, right: Doubles) -> Doubles:
    """The matrix product, its terms added in order."""
    made, part = np.zeros((left.shape[0], right.shape[1])), np.empty((left.shape[0], right.shape[1]))
    for k in range(left.shape[1]):
        made += np.multiply(left[:, k : k + 1], right[k : k + 1], out=part)
    return made


class Added(NamedTuple):
    """A weight with a product added: all of it, or the share that a mapping program moves into the adapted tensor."""

    weight: ForeignTensor
    product: Product
    move: BoxMove | None = None

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.weight, self.product.low, self.product.high

    @property
    def terms(self) -> object:
        return self.product.scale, self.product.view, self.product.experts, self.move

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        return self.exact(box, fetch).astype(np.float32)

    def exact(self, box: Box, fetch: FetchBox) -> Doubles:
        """The values before they are rounded."""
        made = self.product.part(box, fetch) if self.move is None else _carried(self.move, box, self.product, fetch)
        made += fetch(self.weight, box).astype(np.float64)
        return made


def _carried(move: BoxMove, box: Box, product: Product, fetch: FetchBox) -> Doubles:
    """A box of a move's source: its share of the product, and zeros where the move takes nothing."""
    made = np.zeros(box.shape)
    share = drawn(move, box)
    if share is not None:
        part = product.part(share.target, fetch)
        named = [place for place, axis in enumerate(share.axes) if axis is not None]
        axes = [axis for axis in share.axes if axis is not None]
        turned = part.reshape([part.shape[place] for place in named]).transpose(np.argsort(axes))
        made[share.box.within(box).slices] = turned.reshape(share.box.shape)
    return made


class Magnified:
    """DoRA: a weight with its product added, each output's row scaled to a trained length.

    The lengths of rows follow from whole rows; where outputs are columns (Conv1D, embeddings), from one more scan of the
    weight.
    """

    def __init__(self, added: Added, magnitude: ForeignTensor) -> None:
        self._added, self._magnitude = added, magnitude
        self._columns = added.product.view == "turned"
        self._lengths: Doubles | None = None  # of columns, while the tensor is being merged

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (*self._added.inputs, self._magnitude)

    @property
    def terms(self) -> object:
        return self._added.terms

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        magnitude = fetch(self._magnitude, whole(self._magnitude.spec.shape)).astype(np.float64).ravel()
        if self._columns:
            made = self._added.exact(box, fetch)
            column, columns = box.offset[1], box.shape[1]
            factor = magnitude[column : column + columns] / self._column_lengths(fetch)[column : column + columns]
            return (made * factor).astype(np.float32)
        shape, (row, rows) = self._added.weight.spec.shape, (box.offset[0], box.shape[0])
        full = self._added.exact(Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:])), fetch)
        lengths = np.sqrt(np.square(full).reshape(rows, -1).sum(axis=1))
        inner = tuple(slice(start, stop) for start, stop in zip(box.offset[1:], box.stop[1:], strict=True))
        factor = (magnitude[row : row + rows] / lengths).reshape(rows, *(1 for _ in shape[1:]))
        taken: Doubles = full[(slice(None), *inner)] * factor
        return taken.astype(np.float32)

    def _column_lengths(self, fetch: FetchBox) -> Doubles:
        if self._lengths is None:
            rows, columns = self._added.weight.spec.shape
            squares, step = np.zeros(columns), max(_NORM_ELEMENTS // columns, 1)
            for row in range(0, rows, step):
                taken = Box((row, 0), (min(step, rows - row), columns))
                squares += np.square(self._added.exact(taken, fetch)).sum(axis=0)
            self._lengths = np.sqrt(squares)
        return self._lengths


class BiasAdded(NamedTuple):
    """A bias with the adapter's own added."""

    bias: ForeignTensor
    added: ForeignTensor
    scale: float

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.bias, self.added

    @property
    def terms(self) -> float:
        return self.scale

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        added = fetch(self.added, box).astype(np.float64) * self.scale
        return (fetch(self.bias, box).astype(np.float64) + added).astype(np.float32)


class TokenRows(NamedTuple):
    """An embedding with the rows of some tokens replaced."""

    weight: ForeignTensor
    rows: ForeignTensor  # [tokens, width]
    tokens: tuple[int, ...]

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.weight, self.rows

    @property
    def terms(self) -> tuple[int, ...]:
        return self.tokens

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        made = fetch(self.weight, box).astype(np.float32)
        here = [number for number, token in enumerate(self.tokens) if box.offset[0] <= token < box.stop[0]]
        if here:
            trained = fetch(self.rows, Box((0, box.offset[1]), (len(self.tokens), box.shape[1])))
            made[[self.tokens[number] - box.offset[0] for number in here]] = trained[here]
        return made


def fits(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...], turned: bool, embedding: bool) -> View | None:
    """How a product of A and B lies in a weight of this shape; None if it does not. `turned` decides for square weights."""
    if not low or len(high) < 2 or low[0] != high[1] or prod(high) != high[0] * high[1]:
        return None
    plain, other = (high[0], *low[1:]) == shape, (*low[1:], high[0]) == shape and len(shape) == 2
    if embedding:
        return "turned" if other else None
    if plain and other:
        return "turned" if turned else "plain"
    return "plain" if plain else "turned" if other else None


def fits_experts(low: tuple[int, ...], high: tuple[int, ...], shape: tuple[int, ...], turned: bool) -> View | None:
    """The same for a weight that holds all experts."""
    if len(low) != 2 or len(high) != 2 or low[0] != high[1] or len(shape) != 3 or low[0] % shape[0]:
        return None
    plain, other = (high[0], low[1]) == shape[1:], (low[1], high[0]) == shape[1:]
    if plain and other:
        return "experts turned" if turned else "experts"
    return "experts" if plain else "experts turned" if other else None
