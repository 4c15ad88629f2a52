"""How data-parallel ranks divide tensors that all of them would hold.

One rule serves every method: a tensor is at `at` in a buffer of which rank r keeps [r·share, (r+1)·share).

- `whole`: a tensor has one keeper, the one with the fewest bytes so far (ties: the lowest index), the largest tensor first.
  This is Paddle's `DygraphShardingOptimizer` (sharding v1), which counts elements: the same where tensors have one dtype.
  `sort=none` takes them in order, as Paddle does with FLAGS_sharding_sort_parameters=0.
- `flat`: tensors follow one another in fused buffers, one dtype a buffer. Megatron-core's distributed optimizer is
  `align=64:pad=128:bucket=…` (`_ParamAndGradBuffer`), but takes parameters from the last to the first of the module's order
  and gives shared embeddings a bucket of their own; Paddle's sharding v2 is `align=` 256 bytes times the ranks with `pad=1`,
  in the order of registration. The order here is the list's, which is known without the model's code: a live optimizer may
  divide otherwise, and each shard states its range. DeepSpeed's stage 3 cuts every parameter: `bucket=1`.
- `dim0`: rows of each tensor as `torch.chunk` gives them (FSDP2); a tensor without dimensions is kept by all.
- `flat-param`: as `flat`, a buffer for each layer and one for the rest (FSDP1; `align` is 16 bytes with use_orig_params).

An empty shard is left out; an empty tensor is kept by all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from math import lcm, prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.layout import parts
from holdfast_formats.layout.language import Layout, Sharding
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.region import Shape

ELEMENTS_MAX = 1 << 40  # elements of all tensors together
_LAYER = re.compile(r"(?:^|\.)([0-9]+)\.")


class Sized(Protocol):
    """The part of a tensor's description needed to shard it: a `LocalTensor`, a `TensorSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


class Shard(NamedTuple):
    """Elements [start, stop) of the tensor at `position` in the list, counted row-major in the local tensor."""

    position: int
    start: int
    stop: int


class Cuts(NamedTuple):
    """The division of a list of tensors among all ranks.

    It has the place of each tensor in its buffer, and each rank's share of the buffer; a share of 0 is kept by all.
    """

    ranks: int
    flat: bool  # whether a shard has one dimension, or those of its tensor
    sizes: NDArray[np.int64]
    at: NDArray[np.int64]
    share: NDArray[np.int64]

    def ranges(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Position, start and stop of each of one rank's shards, in the list's order."""
        if not 0 <= index < self.ranks:
            raise InvalidRequest(
                f"sharding rank {index} is not one of {self.ranks}",
                hint="the number of sharding ranks is the layout's sharding=",
            )
        start = np.clip(index * self.share - self.at, 0, self.sizes)
        stop = np.where(self.share == 0, self.sizes, np.clip((index + 1) * self.share - self.at, 0, self.sizes))
        kept = np.flatnonzero((stop > start) | (self.sizes == 0))
        return kept, start[kept], stop[kept]

    def of(self, index: int) -> list[Shard]:
        return [Shard(*shard) for shard in zip(*(column.tolist() for column in self.ranges(index)), strict=True)]


def take(tensors: Sequence[LocalTensor], cut: Cuts, index: int) -> list[LocalTensor]:
    """One rank's shards as local tensors: flat ones have one dimension, others their tensor's rows."""
    return [_shard(tensors[position], cut.flat, start, stop) for position, start, stop in cut.of(index)]


def _shard(tensor: LocalTensor, flat: bool, start: int, stop: int) -> LocalTensor:
    if flat and start < stop:
        return parts.flat(tensor, start, stop)
    if stop - start == tensor.volume:
        return tensor
    row = prod(tensor.shape[1:])
    return parts.rows(tensor, start // row, stop // row)


def cuts(tensors: Sequence[Sized], layout: Layout, count: int) -> Cuts:
    """Which of `count` ranks keeps which elements; `StateMismatch` if the tensors have too many elements to count."""
    if count < 1:
        raise InvalidRequest(f"{count} is not a number of sharding ranks", hint="sharding= in the layout is at least 1")
    volumes = [prod(tensor.shape) for tensor in tensors]
    if sum(volumes) > ELEMENTS_MAX:
        raise StateMismatch(f"{sum(volumes)} elements are too many to share out", hint=f"at most {ELEMENTS_MAX}")
    sizes = np.array(volumes, dtype=np.int64)
    sharding = layout.sharding
    if sharding.method == "whole":
        keepers = np.array(_keepers(tensors, volumes, sharding.sort == "size", count), dtype=np.int64)
        return Cuts(count, False, sizes, keepers * sizes, sizes)
    if sharding.method == "dim0":
        return Cuts(count, False, sizes, np.zeros_like(sizes), np.array([_rows(t.shape, count) for t in tensors], np.int64))
    if not sharding.method:
        return Cuts(count, False, sizes, np.zeros_like(sizes), np.zeros_like(sizes))
    at, shares = np.zeros_like(sizes), np.zeros_like(sizes)
    for positions in _buffers(tensors, sharding):
        _fuse(positions, sizes, sharding, count, (at, shares))
    return Cuts(count, True, sizes, at, shares)


def _keepers(tensors: Sequence[Sized], volumes: Sequence[int], sort: bool, count: int) -> list[int]:
    """For each tensor, the rank that has the fewest bytes at its turn."""
    bits = [dtypes.bits(tensor.dtype) * volume for tensor, volume in zip(tensors, volumes, strict=True)]
    order = sorted(range(len(bits)), key=lambda i: -bits[i]) if sort else range(len(bits))
    held = [(0, rank) for rank in range(count)]
    heapify(held)
    keepers = [0] * len(bits)
    for position in order:
        least, keepers[position] = held[0]
        heapreplace(held, (least + bits[position], keepers[position]))
    return keepers


def _rows(shape: Shape, count: int) -> int:
    """Elements of a chunk along dimension 0; 0 for a tensor without dimensions, which is kept whole."""
    return -(-shape[0] // count) * prod(shape[1:]) if shape else 0


def _buffers(tensors: Sequence[Sized], sharding: Sharding) -> Iterator[NDArray[np.int64]]:
    """The positions of the tensors of each fused buffer."""
    units: dict[tuple[str, str], list[int]] = {}
    layered = sharding.method == "flat-param"
    for position, tensor in enumerate(tensors):
        units.setdefault((unit(tensor.name) if layered else "", tensor.dtype), []).append(position)
    for positions in units.values():
        yield np.array(positions, dtype=np.int64)


def unit(name: str) -> str:
    """The FSDP1 unit of a tensor: its name up to the layer's number, "" if it has none."""
    match = _LAYER.search(name)
    return name[: match.end(1)] if match else ""


def _fuse(
    positions: NDArray[np.int64],
    sizes: NDArray[np.int64],
    sharding: Sharding,
    count: int,
    share_columns: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> None:
    """Place tensors of one dtype one after the other, and close a buffer when it has its bucket's elements."""
    at, shares = share_columns
    align = sharding.align
    grain = count * align if sharding.method == "flat" and not sharding.pad else lcm(count, sharding.pad or 1)
    own = sizes[positions]
    stops = np.cumsum(-(-own // align) * align)
    starts = np.concatenate(([0], stops[:-1]))
    ends = starts + own
    first = 0
    while first < len(positions):
        last = len(positions)
        if sharding.bucket:  # the tensor with which the buffer reaches its size is its last one
            last = min(int(np.searchsorted(ends, starts[first] + sharding.bucket)) + 1, last)
        inside = positions[first:last]
        at[inside] = starts[first:last] - starts[first]
        length = int(ends[last - 1] - starts[first])
        shares[inside] = -(-length // grain) * grain // count
        first = last
