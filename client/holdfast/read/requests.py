"""Resolves wanted tensor parts to extents: which to read, and which target receives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast_formats import dtypes, transfer
from holdfast_formats.disk import coded, codings
from holdfast_formats.disk.manifests import Manifest, TensorEntry
from holdfast_formats.disk.read_planner import extents_of, resolve
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, ByteView, byte_box, byte_span, byte_view, check_box

COPIED_ALONE_BYTES = 2**14  # below, handing over the interpreter costs more than the copy


class Want(NamedTuple):
    """A box of a tensor, in elements, and the array that receives it.

    `into` is writable, may be strided, and has the shape of the box in `region.byte_view` coordinates and the unsigned dtype
    `transfer.element_dtype(itemsize)`.
    """

    group: str
    name: str
    box: Box
    target: NDArray[Any]


class Receiver(NamedTuple):
    """A resolved want; shape and box are in `byte_view` coordinates.

    `octets` are the receiver's bytes, if the tensor's bytes from `first` on are contiguous in both receiver and file.
    """

    into: NDArray[Any]
    view: ByteView
    box: Box
    first: int
    octets: memoryview | None

    def take(self, offset: int, data: memoryview) -> None:
        """Copy what the receiver needs of these bytes, which begin at `offset` in the tensor."""
        if self.octets is None:
            elements = np.frombuffer(data, transfer.element_dtype(self.view.itemsize))
            start = offset // self.view.itemsize
            transfer.move(transfer.Direction.SCATTER, elements, start, self.into, self.box, self.view.shape)
            return
        low, high = max(self.first - offset, 0), min(self.first + len(self.octets) - offset, len(data))
        at = low + offset - self.first
        copy(self.octets[at : at + high - low], data[low:high])


def copy(into: memoryview, data: memoryview) -> None:
    """Copy bytes; large copies release the interpreter lock."""
    if len(data) < COPIED_ALONE_BYTES:
        into[:] = data
    else:
        native_copy.copy(into, data)


class ExtentRun(NamedTuple):
    """Extents [first, stop) of a tensor, and the receivers of all of them.

    `octets`, if set, is memory of the only receiver into which the run's bytes can be read directly.
    """

    group: str
    name: str
    entry: TensorEntry
    first: int
    stop: int
    receivers: tuple[Receiver, ...]
    octets: memoryview | None

    @property
    def offset(self) -> int:
        return self.entry.extents[self.first].offset

    @property
    def length(self) -> int:
        last = self.entry.extents[self.stop - 1]
        return last.offset + last.length - self.offset


def runs(manifest: Manifest, wants: Iterable[Want], label: str) -> list[ExtentRun]:
    """The extents that the wants need, by file and position, each in one run.

    Raises `StateMismatch` for a tensor that does not match.
    """
    tensors: dict[tuple[str, str], tuple[TensorEntry, list[Receiver]]] = {}
    for want in wants:
        name, entry = resolve(manifest, want.group, want.name, label)
        tensors.setdefault((want.group, name), (entry, []))[1].append(_receiver(want, entry))
    placed = sorted((entry.file, entry.start, key, entry, receivers) for key, (entry, receivers) in tensors.items())
    return [run for _, _, (group, name), entry, receivers in placed for run in _runs(group, name, entry, receivers)]


def _runs(group: str, name: str, entry: TensorEntry, receivers: Sequence[Receiver]) -> Iterator[ExtentRun]:
    """Cut a tensor's extents where their set of receivers changes."""
    if len(receivers) == 1:
        octets = receivers[0].octets
        if octets is not None and len(entry.extents) == 1 and len(octets) == entry.extents[0].length:
            yield ExtentRun(group, name, entry, 0, 1, tuple(receivers), octets)  # small tensors, of which there may be many
            return
        for first, stop in extents_of(entry.extents, receivers[0].box, receivers[0].view):
            yield from _split(group, name, entry, first, stop, (receivers[0],))
        return
    edges: dict[int, list[int]] = {}  # where receivers begin, or end
    for number, receiver in enumerate(receivers):
        for touched in extents_of(entry.extents, receiver.box, receiver.view):
            for edge in touched:
                edges.setdefault(edge, []).append(number)
    active: dict[int, Receiver] = {}
    first = 0
    for edge in sorted(edges):
        if active:
            yield from _split(group, name, entry, first, edge, tuple(active.values()))
        for number in edges[edge]:
            if active.pop(number, None) is None:
                active[number] = receivers[number]
        first = edge


def _split(
    group: str, name: str, entry: TensorEntry, first: int, stop: int, receivers: tuple[Receiver, ...]
) -> Iterator[ExtentRun]:
    """A run, or up to three if one receiver takes all of its extents but only a part of the first or the last one."""
    octets = receivers[0].octets if len(receivers) == 1 else None
    if octets is None:
        yield ExtentRun(group, name, entry, first, stop, receivers, None)
        return
    begin, end = receivers[0].first, receivers[0].first + len(octets)
    extents = entry.extents
    low = first + (extents[first].offset < begin)
    high = stop - (extents[stop - 1].offset + extents[stop - 1].length > end)
    if low >= high:
        yield ExtentRun(group, name, entry, first, stop, receivers, None)
        return
    if first < low:
        yield ExtentRun(group, name, entry, first, low, receivers, None)
    last = extents[high - 1]
    inner = octets[extents[low].offset - begin : last.offset + last.length - begin]
    yield ExtentRun(group, name, entry, low, high, receivers, inner)
    if high < stop:
        yield ExtentRun(group, name, entry, high, stop, receivers, None)


def _receiver(want: Want, entry: TensorEntry) -> Receiver:
    into, view = want.target, byte_view(entry.dtype, entry.shape, want.name)
    if want.box.shape == entry.shape and not any(want.box.offset):
        box, span = Box((0,) * len(view.shape), view.shape), (0, entry.nbytes)
    else:
        check_box(want.box, entry.shape, want.name)
        box = byte_box(entry.dtype, want.box, entry.shape, want.name)
        span = byte_span(box, view.shape, view.itemsize)
    if into.shape != box.shape or into.dtype != transfer.element_dtype(view.itemsize):
        raise StateMismatch(
            f"tensor {want.name!r}: {into.dtype}{list(into.shape)} cannot receive "
            f"{view.itemsize}-byte elements of shape {list(box.shape)}",
            hint=f"give an array of {transfer.element_dtype(view.itemsize)}{list(box.shape)}",
        )
    straight = into.flags.c_contiguous and into.nbytes == span[1] - span[0]
    octets = into.reshape(-1).view(np.uint8).data if straight else None
    return Receiver(into, view, box, span[0], octets)


BATCH_ELEMENTS = 2**22  # decoded at once: the arithmetic takes some 50 bytes for each


class CodedWant(NamedTuple):
    """A wanted box of a coded tensor, with its stored name."""

    want: Want
    name: str


class _Slab(NamedTuple):
    """A part of a wanted box, and the stored parts for decoding it."""

    of: CodedWant
    box: Box
    parts: dict[str, NDArray[Any]]
    wants: list[Want]


def parted(manifest: Manifest, wants: Iterable[Want]) -> tuple[list[Want], list[CodedWant]]:
    """Wants of tensors that are stored as they were saved, and of coded ones.

    Raises `StateMismatch` for a box or a receiver that does not fit a coded tensor.
    """
    if manifest.compacted is None:
        return list(wants), []
    plain: list[Want] = []
    small: list[CodedWant] = []
    for want in wants:
        stored_form = coded.find(manifest, want.group, want.name)
        if stored_form is None:
            plain.append(want)
            continue
        check_box(want.box, stored_form[1].shape, want.name)
        if want.target.shape != want.box.shape or want.target.dtype != transfer.element_dtype(4):
            raise StateMismatch(
                f"tensor {want.name!r}: {want.target.dtype}{list(want.target.shape)} cannot receive 4-byte elements of "
                f"shape "
                f"{list(want.box.shape)}",
                hint=f"give an array of {transfer.element_dtype(4)}{list(want.box.shape)}",
            )
        small.append(CodedWant(want, stored_form[0]))
    return plain, small


def coded_files(manifest: Manifest, small: Iterable[CodedWant]) -> set[str]:
    needed = (need for one in small for need in coded.needs(manifest, one.want.group, one.name, one.want.box).values())
    return {resolve(manifest, need.group, need.name)[1].file for need in needed}


def coded_batches(manifest: Manifest, small: Iterable[CodedWant]) -> Iterator[list[_Slab]]:
    batch: list[_Slab] = []
    held = 0
    for one in small:
        for box in codings.slabs(one.want.box, BATCH_ELEMENTS):
            if batch and held + box.volume > BATCH_ELEMENTS:
                yield batch
                batch, held = [], 0
            batch.append(_slab(manifest, one, box))
            held += box.volume
    if batch:
        yield batch


def wants_of(batch: Iterable[_Slab]) -> list[Want]:
    return [want for slab in batch for want in slab.wants]


def decode_batch(manifest: Manifest, batch: Iterable[_Slab]) -> None:
    """Write the values of a batch whose parts have been read."""
    for slab in batch:
        want = slab.of.want
        values = coded.decoded(manifest, want.group, slab.of.name, slab.box, slab.parts)
        inside = slab.box.within(want.box)
        place = tuple(slice(o, o + n) for o, n in zip(inside.offset, inside.shape, strict=True))
        want.target[place] = values.view(want.target.dtype)


def _slab(manifest: Manifest, one: CodedWant, box: Box) -> _Slab:
    parts: dict[str, NDArray[Any]] = {}
    wants: list[Want] = []
    for role, need in coded.needs(manifest, one.want.group, one.name, box).items():
        _, entry = resolve(manifest, need.group, need.name)
        parts[role] = np.empty(need.box.shape, dtypes.to_numpy(entry.dtype))
        receiver = parts[role].view(transfer.element_dtype(parts[role].itemsize))
        wants.append(Want(need.group, need.name, need.box, receiver))
    return _Slab(one, box, parts, wants)
