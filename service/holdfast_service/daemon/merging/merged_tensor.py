"""A merged tensor as one of a listing: the executor asks for a box, and it is computed from the same box of every input."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import LimitExceeded
from holdfast_formats.foreign.listing import FetchBox, ForeignTensor, TensorKey
from holdfast_formats.region import Box, byte_runs
from holdfast_formats.tensors import TensorSpec
from holdfast_service.daemon.merging.scanning import BLOCK_ELEMENTS, Block, Floats, Terms, blocks, flat

CHUNK_BYTES = 2**26  # of all F32 copies that a chunk needs at the same time
BAND_BYTES = 2**25  # what the executor computes at once
COPIES_AT_ONCE = 4  # of a chunk, besides those of the inputs and of their task vectors
ROW_ELEMENTS_MAX = 2**24


class MergedTensor:
    """Computes one merged tensor. For one thread."""

    band_bytes = BAND_BYTES

    def __init__(self, spec: TensorSpec, inputs: tuple[ForeignTensor, ...], terms: Terms, chunk: int = 0) -> None:
        """`inputs` are of the spec's shape. `chunk`: elements at a time, 0 for as many as memory allows.

        Raises `LimitExceeded`, by name, for rows that are too long to be ranked.
        """
        self.inputs, self.terms = inputs, terms
        self._spec, self._formula = spec, terms.begin(spec.shape)
        if self._formula.row > ROW_ELEMENTS_MAX:
            raise LimitExceeded(f"a row of tensor {spec.name!r} has over {ROW_ELEMENTS_MAX} elements")
        room = CHUNK_BYTES // (4 * (2 * len(inputs) + COPIES_AT_ONCE))
        self._chunk = self._rows(chunk or room)
        self._scanned = self._rows(min(BLOCK_ELEMENTS, room))
        self._prepared = False

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """The merged values of a box, rounded to the spec's dtype once."""
        if not self._prepared:
            self._formula.prepare(lambda: self._blocks(fetch))
            self._prepared = True
        made = np.empty(box.volume, dtypes.to_numpy(self._spec.dtype))
        for start, at, length in byte_runs(box, self._spec.shape, 1):
            for low in range(start, start + length, self._chunk):
                high = min(low + self._chunk, start + length)
                with np.errstate(over="ignore", invalid="ignore"):
                    made[at + low - start : at + high - start] = self._merged(low, high, fetch).astype(
                        made.dtype, copy=False
                    )
        return made.reshape(box.shape)

    def _merged(self, low: int, high: int, fetch: FetchBox) -> Floats:
        """A stretch, of which whole rows are computed."""
        row = self._formula.row
        begin = low - low % row
        stop = high + -high % row
        made = self._formula.merge(self._block(begin, stop, fetch))
        return made[low - begin : high - begin]

    def _blocks(self, fetch: FetchBox) -> Iterator[Block]:
        with np.errstate(over="ignore", invalid="ignore"):
            for start, stop in blocks(prod(self._spec.shape), self._scanned):
                yield self._block(start, stop, fetch)

    def _block(self, start: int, stop: int, fetch: FetchBox) -> Block:
        return Block(start, [flat(fetch, one, start, stop) for one in self.inputs])

    def _rows(self, elements: int) -> int:
        """About so many elements, in whole rows."""
        return max(elements // self._formula.row, 1) * self._formula.row


def merged(key: TensorKey, dtype: str, inputs: tuple[ForeignTensor, ...], terms: Terms) -> ForeignTensor:
    """The tensor of a merge as one of a listing."""
    spec = TensorSpec(key.group, key.name, dtype, inputs[0].spec.shape)
    return ForeignTensor(spec, (), decoder=MergedTensor(spec, inputs, terms))
