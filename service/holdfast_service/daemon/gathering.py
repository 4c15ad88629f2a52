"""The bytes of one planned file, put together from the slots of all ranks, window by window and digested in the same pass.

A window is written in whole aligned blocks, while tensors and extents begin and end anywhere. So each window holds whole
extents, and the block that two windows share is written by the later one, which gathers the end of the earlier once more.
Windows depend on nothing but the slots: threads take them in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast_formats.digest import running
from holdfast_formats.holdings import Bytes, Holding, gather, hold, hold_all
from holdfast_formats.manifest import EXTENT_BYTES_MAX, Extent
from holdfast_formats.packing import tensor_extent_bytes
from holdfast_formats.plan import Origin, PlannedFile, PlannedTensor

CACHED_BYTES = 2**19  # what a core's own cache holds besides what it comes from

Slots = Mapping[int, memoryview]  # rank -> the data of its sealed slot


class Cut(NamedTuple):
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
    """A window's bytes, their place in the file, and the extents that end in it."""

    start: int
    data: Bytes
    extents: list[tuple[PlannedTensor, Extent]]


class FileBytes:
    """What a planned file consists of, and how its bytes are gathered; no extent is longer than `extent_bytes`."""

    def __init__(self, file: PlannedFile, slots: Slots, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        header = np.frombuffer(file.layout.header, np.uint8)
        self.cuts = list(_header_cuts(header))
        flat = {rank: np.frombuffer(data, np.uint8) for rank, data in slots.items() if len(data)}
        for tensor in file.tensors:
            held = [_hold(tensor, origin, flat) for origin in tensor.origins]
            size = tensor.spec.nbytes
            for offset in range(0, size, EXTENT_BYTES_MAX):
                length = min(EXTENT_BYTES_MAX, size - offset)
                self.cuts.append(Cut(tensor.start + offset, length, offset, tensor, held))

    def windows(self) -> Iterator[Window]:
        """The file in order: as many whole cuts a window as fit it."""
        first, room = 0, EXTENT_BYTES_MAX
        for position, cut in enumerate(self.cuts):
            if cut.length > room and position > first:
                yield Window(first, position)
                first, room = position, EXTENT_BYTES_MAX
            room -= cut.length
        yield Window(first, len(self.cuts))

    def gather(self, window: Window, alignment: int, buffer: Bytes) -> Gathered:
        """Fill `buffer` with a window's bytes from an aligned place on, up to one unless it is the file's last window."""
        begin, end = self.cuts[window.first].start, self.cuts[window.last - 1].stop
        low = begin - begin % alignment
        self._gather_end_of_earlier(window.first, low, buffer)
        extents: list[tuple[PlannedTensor, Extent]] = []
        for cut in self.cuts[window.first : window.last]:
            target = buffer[cut.start - low : cut.start - low + cut.length]
            if cut.tensor is None:
                _gather(cut, cut.offset, target)
            else:
                extents += [(cut.tensor, extent) for extent in _gather_digested(cut, target, self._extent_bytes)]
        high = end if window.last == len(self.cuts) else end - end % alignment
        return Gathered(low, buffer[: max(high - low, 0)], extents)

    def _gather_end_of_earlier(self, first: int, low: int, buffer: Bytes) -> None:
        position = first - 1
        while position >= 0 and self.cuts[position].stop > low:
            cut = self.cuts[position]
            begin = max(cut.start, low)
            _gather(cut, cut.offset + begin - cut.start, buffer[begin - low : cut.stop - low])
            position -= 1


def _header_cuts(header: Bytes) -> Iterator[Cut]:
    for start in range(0, header.nbytes, EXTENT_BYTES_MAX):
        length = min(EXTENT_BYTES_MAX, header.nbytes - start)
        yield Cut(start, length, start, None, (), header)


def _hold(tensor: PlannedTensor, origin: Origin, flat: Mapping[int, Bytes]) -> Holding:
    data = flat[origin.rank][origin.slot_offset :]
    if len(tensor.origins) == 1:  # it tiles the tensor alone
        return hold_all(tensor.spec, data)
    return hold(tensor.spec, origin.box, data)


def _gather(cut: Cut, offset: int, target: Bytes) -> None:
    """The bytes of a cut's tensor from `offset` on, as many as `target` takes."""
    if cut.tensor is None:
        assert cut.raw is not None
        target[:] = cut.raw[offset : offset + target.nbytes]
        return
    copied = gather(cut.tensor.spec, cut.held, offset, target)
    assert copied == target.nbytes, f"{cut.tensor.spec.name}: {copied} of {target.nbytes} bytes gathered"


def _gather_digested(cut: Cut, target: Bytes, extent_bytes: int) -> Iterator[Extent]:
    """Gather a whole cut, and yield its extents: part by part, so that a digest finds the bytes in a core's cache."""
    assert cut.tensor is not None  # a header has one digest, which the plan knows
    extent_bytes = tensor_extent_bytes(cut.tensor.spec.nbytes, extent_bytes)
    part_bytes = cut.length if any(held.span is None for held in cut.held) else CACHED_BYTES
    found, low = running(), 0
    for at in range(0, cut.length, part_bytes):
        part = target[at : at + part_bytes]
        _gather(cut, cut.offset + at, part)
        while low < at + part.nbytes:
            begin = low - low % extent_bytes
            end = min(begin + extent_bytes, cut.length)
            high = min(end, at + part.nbytes)
            found.update(target[low:high].data)
            if high == end:
                yield Extent(cut.offset + begin, end - begin, found.hexdigest())
                found = running()
            low = high
