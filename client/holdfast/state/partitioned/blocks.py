"""Optimizer state in blocks: codes of some consecutive elements share a scale. Where its parts are stored.

An optimizer makes blocks of the elements that it holds: of this rank's part, row by row. Codes with the part's shape are
stored at the part's place in the whole tensor. Scales, and codes that are packed into one dimension, are stored one part
after the other, in the order of the parts' first elements. If each part is a run of whole blocks of the whole tensor, this
is what one rank would store. Otherwise the optimizer's document says of which parts the blocks are:

    "blocks": {name: {key: {"size": elements of a block, "parts": [[offset, shape], …]}}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.tensors.fragments import Fragment, FragmentList
from holdfast.tensors.live_pieces import Shards
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.region import Box, Shape, first_overlap, intersect, whole

_BY_KEY = re.compile(r"state(\d)")  # bitsandbytes: state1 has codes, absmax1 scales, qmap1 the values of the codes
_SIZE_BY_KEY = 256  # of bitsandbytes; older versions had more


class PartKeys(NamedTuple):
    """The keys of the tensors of one state, and for each the name that its class has for it."""

    key: str
    codes: str
    scale: str
    table: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return (self.codes, self.scale, *([] if self.table is None else [self.table]))


class Blocks(NamedTuple):
    """What the blocks are of: the parts into which a tensor is cut, blocks of `size` elements, `packed` codes in a byte if
    these have one dimension, else 0.
    """

    size: int
    packed: int
    shards: Shards

    @property
    def is_regular(self) -> bool:
        """Whether each part is a run of whole blocks of the whole tensor."""
        outer = whole(self.shards.shape)
        spans = [span_in(box, outer) for box in self.shards.boxes]
        return all(span is not None and span.start % self.size == 0 for span in spans)

    @property
    def scale_starts(self) -> list[int]:
        """The first scale of each part, and the number of all."""
        return list(accumulate((-(-box.volume // self.size) for box in self.shards.boxes), initial=0))

    @property
    def code_starts(self) -> list[int]:
        """The first byte of each part's packed codes, and the number of all."""
        return list(accumulate((box.volume // self.packed for box in self.shards.boxes), initial=0))

    def scale_at(self, tensor: torch.Tensor, part: int | None) -> Fragment:
        return _line(tensor, self.scale_starts, part)

    def codes_at(self, tensor: torch.Tensor, part: int | None) -> Fragment:
        """The place of a part's codes; packed ones, or ones of the part's shape."""
        if self.packed:
            return _line(tensor, self.code_starts, part)
        if part is None:
            return Fragment(tensor.reshape(-1), self.shards.shape, flat=(0, 0))
        return Fragment(tensor, self.shards.shape, offset=self.shards.boxes[part].offset)

    def described(self) -> dict[str, Any]:
        """As the document has it; empty for blocks that one rank would have too."""
        if self.is_regular:
            return {}
        return {"size": self.size, "parts": [[list(box.offset), list(box.shape)] for box in self.shards.boxes]}


class SameBlocks(NamedTuple):
    """Consecutive blocks that are the same ones in both: the first among all stored ones, the first of this rank, how many.
    `code` is the first element in the stored order of parts.
    """

    stored: int
    code: int
    live: int
    length: int
    elements: int


class Span(NamedTuple):
    start: int
    stop: int


def parts_of_wrapper(key: str, attributes: Sequence[str]) -> PartKeys | None:
    """Those of a wrapper tensor with attributes that are called as torchao calls them."""
    if not {"codes", "scale"} <= set(attributes) <= {"codes", "scale", "qmap"}:
        return None
    return PartKeys(key, f"{key}.codes", f"{key}.scale", f"{key}.qmap" if "qmap" in attributes else None)


def parts_of_keys(keys: Mapping[str, Any]) -> Iterator[PartKeys]:
    """Those that an optimizer keeps as plain tensors under the keys of bitsandbytes."""
    for key in keys:
        found = _BY_KEY.fullmatch(key)
        if found and {f"absmax{found[1]}", f"qmap{found[1]}"} <= keys.keys():
            yield PartKeys(key, key, f"absmax{found[1]}", f"qmap{found[1]}")


def size_by_key(elements: int, scales: int) -> int | None:
    """The elements of a block of bitsandbytes, from the number of scales; None if it is no power of two."""
    sizes = [_SIZE_BY_KEY, *(2**n for n in range(5, 17))]
    return next((size for size in sizes if -(-elements // size) == scales), None)


def read(described: object, shape: Shape, packed: int, path: str) -> Blocks:
    """The blocks that a document describes; `CorruptManifest` if it is not valid."""
    try:
        size, parts = described["size"], described["parts"]  # type: ignore[index]
        boxes = tuple(Box(tuple(map(int, offset)), tuple(map(int, extent))) for offset, extent in parts)
        sound = type(size) is int and size > 0 and sum(box.volume for box in boxes) == prod(shape)
        sound = sound and all(intersect(box, whole(shape)) == box for box in boxes) and first_overlap(boxes) is None
    except (TypeError, ValueError, LookupError):
        sound = False
    if not sound:
        raise CorruptManifest(
            f"{path}: the stored description of its blocks is not valid",
            hint="restore another step, or leave the optimizer's state out: restore(groups=…)",
            file="state.json",
        )
    return Blocks(size, packed, Shards(shape, boxes, None))


def span_in(box: Box, outer: Box) -> Span | None:
    """Where a box's elements are among those of `outer`, row by row; None if others are between them."""
    inner = box.within(outer)
    first = next((d for d, n in enumerate(inner.shape) if n != 1), len(inner.shape))
    if inner.shape[first + 1 :] != outer.shape[first + 1 :]:
        return None
    start = 0
    for at, n in zip(inner.offset, outer.shape, strict=True):
        start = start * n + at
    return Span(start, start + inner.volume)


def runs(stored: Blocks, live: Box, size: int) -> list[SameBlocks] | None:
    """The stored blocks that a rank with this part has as its own; None if some are not."""
    if size != stored.size:
        return None
    found = []
    elements = accumulate((box.volume for box in stored.shards.boxes), initial=0)
    for box, scale, code in zip(stored.shards.boxes, stored.scale_starts[:-1], elements, strict=False):
        common = intersect(box, live)
        if common is None:
            continue
        theirs, mine = span_in(common, box), span_in(common, live)
        if theirs is None or mine is None or theirs.start % size or mine.start % size:
            return None
        if common.volume % size and (theirs.stop, mine.stop) != (box.volume, live.volume):
            return None
        length = -(-common.volume // size)
        run = SameBlocks(scale + theirs.start // size, code + theirs.start, mine.start // size, length, common.volume)
        found.append(run)
    return found


def scale_parts(tensor: torch.Tensor, total: int, found: Sequence[SameBlocks], path: str) -> FragmentList:
    """A rank's scales as parts of all stored ones."""
    cut = [Fragment(tensor[run.live : run.live + run.length], (total,), offset=(run.stored,)) for run in found]
    return FragmentList(cut, path)


def code_parts(tensor: torch.Tensor, blocks: Blocks, found: Sequence[SameBlocks], path: str) -> FragmentList:
    """A rank's packed codes as parts of all stored ones."""
    packed, cut = blocks.packed, []
    for run in found:
        start = run.live * blocks.size // packed
        held = tensor[start : start + run.elements // packed]
        cut.append(Fragment(held, (blocks.code_starts[-1],), offset=(run.code // packed,)))
    return FragmentList(cut, path)


def _line(tensor: torch.Tensor, starts: Sequence[int], part: int | None) -> Fragment:
    return Fragment(tensor, (starts[-1],), offset=(0 if part is None else starts[part],))
