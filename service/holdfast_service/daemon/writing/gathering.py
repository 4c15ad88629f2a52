"""The bytes of one planned file, out of the slots of all ranks, window by window and digested in the same pass.

A window is written in whole aligned blocks, while tensors and extents begin and end anywhere. So each window holds whole
extents, and the block that two windows share is written by the later one, which gathers the end of the earlier again.
Windows depend on nothing but the slots: threads take them in any order.

Bytes with the same order and block offset in slot and file are written from the slot, digested but not copied; clients lay
out long tensors so (`staging.lay_out`). The rest is gathered in a buffer: extents shared by several ranks, blocks where
tensors meet, and values rounded from masters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from holdfast_formats import rounding
from holdfast_formats.digest import digest, running
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent
from holdfast_formats.disk.packing import tensor_extent_bytes
from holdfast_formats.staging.holdings import Bytes, Holding, gather, hold, hold_all, view
from holdfast_formats.staging.plan import BoxOrigin, PlannedFile, PlannedTensor

WRITE_BYTES = 8 * 2**20  # of a window; a single cut may be longer. Where all cores are busy, longer ones are slower
CACHED_BYTES = 2**19  # what a core's own cache holds besides what it comes from
STRAIGHT_BYTES_MIN = 2**17  # less is sooner copied than written as a buffer of its own

Slots = Mapping[int, memoryview]  # rank -> the data of its sealed slot


class ExtentSlice(NamedTuple):
    """Whole extents: `length` bytes of a tensor from `offset` on, at `start` in the file. A part of the header is `raw`."""

    start: int
    length: int
    offset: int
    tensor: PlannedTensor | None
    held: Sequence[Holding]
    raw: Bytes | None = None

    @property
    def stop(self) -> int:
        return self.start + self.length


class Window(NamedTuple):
    """The cuts [first, last) of a file."""

    first: int
    last: int


class Gathered(NamedTuple):
    """A window's bytes in buffers of whole blocks, their place in the file, and the extents that end in it. `tail` is what
    the file has beyond its last whole block.
    """

    start: int
    blocks: list[Bytes]
    tail: Bytes
    extents: list[tuple[PlannedTensor, Extent]]


class FilePart(NamedTuple):
    """The bytes [begin, end) of a file, of which each block of `block_bytes` is one node's to write.

    No extent crosses the edge of a block. The part begins at one, and ends at one or with the file.
    """

    begin: int
    end: int
    block_bytes: int


class FileBytes:
    """The contents of a planned file, or a part of it, and their gathering; no extent is longer than `extent_bytes`."""

    def __init__(self, file: PlannedFile, slots: Slots, extent_bytes: int, part: FilePart | None = None) -> None:
        """`slots` has all ranks from which the file, or the part, is read."""
        self._extent_bytes = extent_bytes
        header = np.frombuffer(file.layout.header, np.uint8)
        self.cuts = list(_header_cuts(header, part))
        flat = {rank: np.frombuffer(data, np.uint8) for rank, data in slots.items() if len(data)}
        for tensor in tensors_in(file, part):
            held = [_hold(tensor, origin, flat) for origin in tensor.origins if origin.rank in flat]
            size = tensor.spec.nbytes
            step = tensor_extent_bytes(size, extent_bytes)
            edges = _edges(held, size, step)
            if part is not None:
                edges = _cut_at_blocks(edges, tensor.start, step, part)
            for offset, end in pairwise(edges):
                self.cuts.append(ExtentSlice(tensor.start + offset, end - offset, offset, tensor, held))

    def windows(self) -> Iterator[Window]:
        """The file in order: as many whole cuts a window as fit it, and one at least."""
        first, room = 0, WRITE_BYTES
        for position, cut in enumerate(self.cuts):
            if cut.length > room and position > first:
                yield Window(first, position)
                first, room = position, WRITE_BYTES
            room -= cut.length
        yield Window(first, len(self.cuts))

    def size(self, window: Window) -> int:
        """In bytes."""
        return self.cuts[window.last - 1].stop - self.cuts[window.first].start

    def gather(self, window: Window, alignment: int, buffer: Bytes) -> Gathered:
        """A window's bytes from an aligned place on, up to one unless it is the file's last window.

        They are in slots, or in `buffer`, at the same offset from its begin as from the window's.
        """
        begin, end = self.cuts[window.first].start, self.cuts[window.last - 1].stop
        low, high = begin - begin % alignment, end - end % alignment
        self._gather_end_of_earlier(window.first, low, buffer)
        extents: list[tuple[PlannedTensor, Extent]] = []
        blocks: list[Bytes] = []
        at = low  # all before is in `blocks`
        for cut in self.cuts[window.first : window.last]:
            target = buffer[cut.start - low : cut.stop - low]
            if cut.tensor is None:
                _gather(cut, cut.offset, target)
                continue
            mapped = _straight(cut, alignment)
            if mapped is None:
                extents += [(cut.tensor, extent) for extent in _gather_digested(cut, target, self._extent_bytes)]
                continue
            extents += [(cut.tensor, extent) for extent in _digested(cut, mapped, self._extent_bytes)]
            head, tail = -cut.start % alignment, cut.stop % alignment
            target[:head], target[cut.length - tail :] = mapped[:head], mapped[cut.length - tail :]
            blocks += [buffer[at - low : cut.start + head - low], mapped[head : cut.length - tail]]
            at = cut.stop - tail
        blocks.append(buffer[at - low : max(high - low, at - low)])
        rest = buffer[high - low : end - low] if window.last == len(self.cuts) else buffer[:0]
        return Gathered(low, [block for block in blocks if block.nbytes], rest, extents)

    def _gather_end_of_earlier(self, first: int, low: int, buffer: Bytes) -> None:
        position = first - 1
        while position >= 0 and self.cuts[position].stop > low:
            cut = self.cuts[position]
            begin = max(cut.start, low)
            _gather(cut, cut.offset + begin - cut.start, buffer[begin - low : cut.stop - low])
            position -= 1


def _edges(held: Sequence[Holding], size: int, step: int) -> list[int]:
    """Where a tensor is cut: by windows, and, at ends of extents, by contiguous parts of slots.

    `step` is the length of its extents, by which windows are divided.
    """
    edges = {*range(0, size, EXTENT_BYTES_MAX), size}
    if len(held) > 1:
        for first, last in (one.span for one in held if one.span is not None):
            begin, end = first + -first % step, size if last == size else last - last % step
            if end - begin >= STRAIGHT_BYTES_MIN:
                edges |= {begin, end}
    return sorted(edges)


def tensors_in(file: PlannedFile, part: FilePart | None) -> Sequence[PlannedTensor]:
    """The tensors with bytes in a part of a file; all of them without one."""
    if part is None:
        return file.tensors
    first = bisect_right(file.tensors, part.begin, key=_end_of)
    last = bisect_left(file.tensors, part.end, lo=first, key=_start_of)
    return file.tensors[first:last]


def _start_of(tensor: PlannedTensor) -> int:
    return tensor.start


def _end_of(tensor: PlannedTensor) -> int:
    return tensor.start + tensor.spec.nbytes


def _cut_at_blocks(edges: Sequence[int], start: int, step: int, part: FilePart) -> list[int]:
    """A tensor's edges in the part, and those of blocks. After a block's edge, extents begin at multiples of `step`
    again.
    """
    low, high = max(part.begin - start, edges[0]), min(part.end - start, edges[-1])
    blocks = set(range(part.begin - start, part.end - start, part.block_bytes))
    edges_found = {*edges, *blocks, *(edge + -edge % step for edge in blocks)}
    return sorted(edge for edge in edges_found | {low, high} if low <= edge <= high)


def _header_cuts(header: Bytes, part: FilePart | None) -> Iterator[ExtentSlice]:
    low, high = (0, header.nbytes) if part is None else (part.begin, min(part.end, header.nbytes))
    for start in range(low, high, EXTENT_BYTES_MAX):
        length = min(EXTENT_BYTES_MAX, high - start)
        yield ExtentSlice(start, length, start, None, (), header)


def _hold(tensor: PlannedTensor, origin: BoxOrigin, flat: Mapping[int, Bytes]) -> Holding:
    data = flat[origin.rank][origin.slot_offset :]
    if origin.box.shape == tensor.spec.shape and not origin.held_as:  # it tiles the tensor alone
        return hold_all(tensor.spec, data)
    return hold(tensor.spec, origin.box, data, origin.held_as)


def _gather(cut: ExtentSlice, offset: int, target: Bytes) -> None:
    if cut.tensor is None:
        assert cut.raw is not None
        target[:] = cut.raw[offset : offset + target.nbytes]
        return
    copied = gather(cut.tensor.spec, cut.held, offset, target)
    assert copied == target.nbytes, f"{cut.tensor.spec.name}: {copied} of {target.nbytes} bytes gathered"
    if cut.held and cut.held[0].held_as:
        rounding.check_rounded(cut.tensor.spec, target[offset % 2 :])


def _straight(cut: ExtentSlice, alignment: int) -> Bytes | None:
    """A whole cut as a view of a slot, if it can be written from there: it has whole blocks besides its ends."""
    if cut.length < max(STRAIGHT_BYTES_MIN, 2 * alignment):
        return None
    mapped = view(cut.held, cut.offset, cut.offset + cut.length)
    return mapped if mapped is not None and (mapped.ctypes.data - cut.start) % alignment == 0 else None


def _extents(cut: ExtentSlice, extent_bytes: int) -> Iterator[tuple[int, int]]:
    assert cut.tensor is not None  # a header has one digest, which the plan knows
    step = tensor_extent_bytes(cut.tensor.spec.nbytes, extent_bytes)
    for begin in range(0, cut.length, step):
        yield begin, min(begin + step, cut.length)


def _digested(cut: ExtentSlice, mapped: Bytes, extent_bytes: int) -> Iterator[Extent]:
    for begin, end in _extents(cut, extent_bytes):
        yield Extent(cut.offset + begin, end - begin, digest(mapped[begin:end].data))


def _gather_digested(cut: ExtentSlice, target: Bytes, extent_bytes: int) -> Iterator[Extent]:
    """Gather a whole cut, and yield its extents: part by part, so that the digest reads from the CPU cache."""
    assert cut.tensor is not None  # a header has one digest, which the plan knows
    extent_bytes = tensor_extent_bytes(cut.tensor.spec.nbytes, extent_bytes)
    part_bytes = cut.length if any(held.span is None for held in cut.held) else CACHED_BYTES
    running_digest, low = running(), 0
    for at in range(0, cut.length, part_bytes):
        part = target[at : at + part_bytes]
        _gather(cut, cut.offset + at, part)
        while low < at + part.nbytes:
            begin = low - low % extent_bytes
            end = min(begin + extent_bytes, cut.length)
            high = min(end, at + part.nbytes)
            running_digest.update(target[low:high].data)
            if high == end:
                yield Extent(cut.offset + begin, end - begin, running_digest.hexdigest())
                running_digest = running()
            low = high
