"""Puts an average into the slots of a save, and describes it in their tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast_formats.errors import CheckpointError, InvalidRequest, RoundAborted
from holdfast_formats.staging import arena, average, average_history, replica_claims, slot_table
from holdfast_formats.staging.arena import PAGE_BYTES
from holdfast_formats.staging.average import GROUP, VALUE, AverageHandover, AverageState
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, box_bytes
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.arena.segment import SealedSlot

log = logging.getLogger(__name__)

STEP_BYTES = 64 * 2**20  # that are copied without letting go of the interpreter


class NotedAverage(NamedTuple):
    """An average in a slot: the checkpoint's description of it, and its updates."""

    state: AverageState
    history: str


def handover(sealed: SealedSlot) -> AverageHandover:
    """The slot's table entry about the average; `InvalidRequest` if the region is not inside the slot."""
    average = sealed.table.average
    if average is None:
        raise RoundAborted(
            f"rank {sealed.table.rank} sent no update of the average for this save, but other ranks did",
            hint="the update may have been lost when a daemon ended; later saves will include the average again. If the "
            "error persists, pass the same ema= on every rank",
        )
    end, tensors = average.slot_offset + average.nbytes, [f for f in sealed.table.fragments if f.spec.group == GROUP]
    outside = any(not average.slot_offset <= f.slot_offset <= f.slot_offset + f.nbytes <= end for f in tensors)
    if average.slot_offset < 0 or average.nbytes < 0 or average.end > len(sealed.data) or outside:
        raise InvalidRequest(f"the average of rank {sealed.table.rank} lies outside its slot")
    return average


def is_filled(sealed: SealedSlot) -> bool:
    return arena.is_filled(sealed.segment.memory, sealed.segment.geometry, sealed.slot)


def put(sealed: SealedSlot, of: AverageSegment, noted_average: NotedAverage) -> None:
    """Copy the accumulator into the slot, and mark it filled; safe to repeat."""
    place = handover(sealed)
    into = np.frombuffer(sealed.data, np.uint8)[place.slot_offset : place.slot_offset + place.nbytes]
    for at in range(0, place.nbytes, STEP_BYTES):
        into[at : at + STEP_BYTES] = of.kept(at, min(STEP_BYTES, place.nbytes - at))
    sealed.data[place.note_offset : place.end] = average_history.encode_note(*noted_average).ljust(PAGE_BYTES, b"\0")
    arena.mark_filled(sealed.segment.memory, sealed.segment.geometry, sealed.slot)


def put_nothing(sealed: SealedSlot) -> None:
    """Record that the save has no average; safe to repeat."""
    place = handover(sealed)
    sealed.data[place.note_offset : place.end] = bytes(PAGE_BYTES)
    arena.mark_filled(sealed.segment.memory, sealed.segment.geometry, sealed.slot)


def noted(sealed: SealedSlot) -> NotedAverage | None:
    """The note about the average in a filled slot."""
    place = handover(sealed)
    note = bytes(sealed.data[place.note_offset : place.end]).rstrip(b"\0")
    return NotedAverage(*average_history.decode_note(note)) if note else None


def tell(parts: Mapping[int, SealedSlot], noted_average: NotedAverage | None) -> None:
    """Describe the average in the tables of all ranks, or remove its group if there is none."""
    for sealed in parts.values():
        sealed.describe(slot_table.without(sealed.table, GROUP) if noted_average is None else _with(sealed, noted_average))


def _with(sealed: SealedSlot, noted_average: NotedAverage) -> SlotTable:
    table = sealed.table
    values = {**table.values, GROUP: {**table.values.get(GROUP, {}), VALUE: average.encode_state(noted_average.state)}}
    place = None if table.average is None else msgspec.structs.replace(table.average, history=noted_average.history)
    return msgspec.structs.replace(table, values=values, average=place, digests=_claimed(sealed))


def _claimed(sealed: SealedSlot) -> bytes:
    """The digests of the slot's table, with the rank's claims about the average: ranks that hold the same box have the same
    bytes in it.
    """
    table = sealed.table
    if not table.digests:  # of a world of one, or of a version without claims
        return b""
    place, octets = handover(sealed), np.frombuffer(sealed.data, np.uint8)
    boxes = [box for fragment in table.fragments if fragment.spec.group == GROUP for box in _boxes(fragment)]
    rows = np.zeros((len(boxes), 2), "<u8")
    for number in set(range(len(boxes))) - set(place.apart):
        begin, size = boxes[number]
        if size:
            rows[number, 0] = replica_claims.sample(octets[begin : begin + size], table.step)
    return table.digests[: len(table.digests) - rows.nbytes] + rows.tobytes()


def _boxes(fragment: StagedFragment) -> Iterator[tuple[int, int]]:
    at = fragment.slot_offset
    for box in fragment.boxes:
        size = box_bytes(fragment.spec, box)
        yield at, size
        at += size


def agreed(parts: Mapping[int, SealedSlot]) -> AverageHandover:
    """The ranks' common handover of the average; `StateMismatch` if their counts differ."""
    handovers = {rank: handover(sealed) for rank, sealed in sorted(parts.items())}
    first = next(iter(handovers.values()))
    for rank, one in handovers.items():
        if one.after != first.after:
            raise CheckpointError(
                f"rank {rank} had {one.after} updates of its average before this save, rank {min(handovers)} {first.after}",
                hint="every rank must take the same optimizer steps, or call ema.update() equally often",
            )
    return first
