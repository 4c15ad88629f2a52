"""A merged tensor as an entry of a listing: each box is computed from the same box of every input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import LimitExceeded
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor, TensorKey
from holdfast_formats.region import Box, byte_runs
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.range_pipeline import MergedPart, RangePipeline, cut
from holdfast_service.wings.merge.scanning import BLOCK_ELEMENTS, Block, Formula, Found, Terms, Workspaces

BAND_BYTES = 2**26  # requested at once; between two bands nothing is read while the last one is computed
ROW_ELEMENTS_MAX = 2**23
_ALIGNED = 8  # blocks are whole bytes of a mask with a bit for each element, if rows are not too long for it


class MergedTensor:
    band_bytes = BAND_BYTES

    def __init__(
        self,
        spec: TensorSpec,
        inputs: tuple[ForeignTensor, ...],
        terms: Terms,
        spaces: Workspaces | None = None,
        chunk: int = 0,
    ) -> None:
        """`inputs` are of the spec's shape; `spaces` are of the job. `chunk`: about how many elements to merge at a time, 0
        for a fast default.

        Raises `LimitExceeded` for rows that are too long to be ranked.
        """
        self.inputs, self.terms = inputs, terms
        self._spec = spec
        self._row = row = terms.begin(spec.shape).row
        if row > ROW_ELEMENTS_MAX:
            raise LimitExceeded(
                f"tensor {spec.name!r} has rows of over {ROW_ELEMENTS_MAX} elements, which are computed at once",
                hint="use a method that does not rank values within rows: linear, ties or dare_ties",
            )
        self._block = max(BLOCK_ELEMENTS // (row * _ALIGNED), 1) * _ALIGNED * row if row * _ALIGNED <= 2**22 else row
        self._chunk = max(chunk // row, 1) * row if chunk else self._block
        self._stretches = RangePipeline(inputs, max(self._block, self._chunk), spaces or Workspaces())
        self._formula: Formula | None = None  # while the tensor is being merged: it keeps masks, a bit an element

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """The merged values of a box, rounded to the spec's dtype once."""
        formula = self._formula
        if formula is None:
            formula = self.terms.begin(self._spec.shape)
            formula.prepare(_WholeTensor(self._stretches, fetch, prod(self._spec.shape), self._block))
            self._formula = formula
        made = np.empty(box.volume, dtypes.to_numpy(self._spec.dtype))
        row, wanted = self._row, list[MergedPart]()
        places: list[tuple[int, int, int]] = []
        for start, at, length in byte_runs(box, self._spec.shape, 1):
            first, last = start - start % row, start + length + -(start + length) % row
            for one in cut(first, last, self._chunk):
                wanted.append(one._replace(number=len(places)))
                places.append((start, at, length))

        def merge(block: Block) -> None:
            start, at, length = places[block.number]
            values = formula.merge(block)
            low, high = max(block.start, start), min(block.start + block.size, start + length)
            into = made[at + low - start : at + high - start]
            np.copyto(into, values[low - block.start : high - block.start], casting="unsafe")

        for _ in self._stretches.each(fetch, wanted, merge):
            pass
        if box.stop == self._spec.shape:  # tensors are merged in order: this one is done
            self._formula = None
        return made.reshape(box.shape)


class _WholeTensor:
    def __init__(self, stretches: RangePipeline, fetch: FetchBox, elements: int, length: int) -> None:
        self._stretches, self._fetch, self.length = stretches, fetch, length
        self._cut = cut(0, elements, length)

    @property
    def blocks(self) -> int:
        return len(self._cut)

    def __call__(self, measure: Callable[[Block], Found], numbers: Sequence[int] | None = None) -> Iterator[Found]:
        wanted: Sequence[MergedPart] = self._cut if numbers is None else [self._cut[number] for number in numbers]
        return self._stretches.each(self._fetch, wanted, measure)


def merged(key: TensorKey, dtype: str, inputs: tuple[ForeignTensor, ...], terms: Terms, spaces: Workspaces) -> ForeignTensor:
    """The tensor of a merge as one of a listing."""
    spec = TensorSpec(key.group, key.name, dtype, inputs[0].spec.shape)
    return ForeignTensor(spec, (), decoder=MergedTensor(spec, inputs, terms, spaces))
