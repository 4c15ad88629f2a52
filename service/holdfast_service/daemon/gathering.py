"""The bytes of one planned file, put together from the slots of all ranks, window by window and digested in the same pass.

A window is written in whole aligned blocks, while extents begin and end anywhere. So each window holds whole extents, and
the block that two windows share is written by the later one, which gathers the end of the earlier extents once more.
Windows depend on nothing but the slots: threads take them in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.digest import digest, running
from holdfast_formats.manifest import EXTENT_BYTES_MAX, Extent
from holdfast_formats.plan import Origin, PlannedFile, PlannedTensor
from holdfast_formats.region import Box, byte_box, byte_span, byte_view
from holdfast_formats.transfer import Direction, element_dtype, move

from .windows import Bytes

CACHED_BYTES = 2**19  # what a core's own cache holds besides what it comes from

Slots = Mapping[int, memoryview]  # rank -> the data of its sealed slot


class Held(NamedTuple):
    """The bytes of an origin in its slot, and the bytes [start, stop) of the tensor that they are: None if strided."""

    flat: Bytes
    span: tuple[int, int] | None
    box: Box  # in byte-view coordinates


class Cut(NamedTuple):
    """An extent: `length` bytes of a tensor from `offset` on, at `start` in the file. A part of the header has no tensor."""

    start: int
    length: int
    offset: int
    tensor: PlannedTensor | None
    held: Sequence[Held]

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
    """What a planned file consists of, and how its bytes are gathered."""

    def __init__(self, file: PlannedFile, slots: Slots) -> None:
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
        """The file in order: as many whole extents a window as fit one extent's size."""
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
            proof = _gather_digested(cut, target)
            if cut.tensor is not None:
                extents.append((cut.tensor, Extent(cut.offset, cut.length, proof)))
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
        yield Cut(start, length, start, None, (Held(header, (0, header.nbytes), Box((), ())),))


def _hold(tensor: PlannedTensor, origin: Origin, flat: Mapping[int, Bytes]) -> Held:
    spec = tensor.spec
    if len(tensor.origins) == 1:  # it tiles the tensor alone
        size = spec.nbytes
        return Held(flat[origin.rank][origin.slot_offset : origin.slot_offset + size], (0, size), origin.box)
    view = byte_view(spec.dtype, spec.shape, spec.name)
    box = byte_box(spec.dtype, origin.box, spec.shape, spec.name)
    length = box.volume * view.itemsize
    span = byte_span(box, view.shape, view.itemsize)
    data = flat[origin.rank][origin.slot_offset : origin.slot_offset + length]
    return Held(data, span if span[1] - span[0] == length else None, box)


def _gather(cut: Cut, offset: int, target: Bytes) -> None:
    """The bytes of a cut's tensor from `offset` on, as many as `target` takes."""
    stop = offset + target.nbytes
    copied = 0
    for held in cut.held:
        if held.span is None:
            _gather_strided(cut, offset, target)
            return
        low, high = max(held.span[0], offset), min(held.span[1], stop)
        if low < high:
            target[low - offset : high - offset] = held.flat[low - held.span[0] : high - held.span[0]]
            copied += high - low
    assert copied == target.nbytes, f"{copied} of {target.nbytes} bytes gathered"


def _gather_digested(cut: Cut, target: Bytes) -> str:
    """Gather a whole cut, and its digest: part by part, so that the digest finds the bytes in a core's cache."""
    if any(held.span is None for held in cut.held):
        _gather(cut, cut.offset, target)
        return digest(target)
    found = running()
    for at in range(0, cut.length, CACHED_BYTES):
        part = target[at : at + CACHED_BYTES]
        _gather(cut, cut.offset + at, part)
        found.update(part.data)
    return found.hexdigest()


def _gather_strided(cut: Cut, offset: int, target: Bytes) -> None:
    assert cut.tensor is not None
    spec = cut.tensor.spec
    view = byte_view(spec.dtype, spec.shape, spec.name)
    into = offset % view.itemsize  # an end of an extent may begin inside an element
    whole: Bytes = np.empty(into + target.nbytes, np.uint8) if into else target
    extent: NDArray[Any] = whole.view(element_dtype(view.itemsize))
    moved = 0
    for held in cut.held:
        elements = held.flat.view(element_dtype(view.itemsize)).reshape(held.box.shape)
        moved += move(Direction.GATHER, extent, offset // view.itemsize, elements, held.box, view.shape)
    assert moved == extent.size, f"{spec.name}: {moved} of {extent.size} elements gathered"
    if into:
        target[:] = whole[into:]
