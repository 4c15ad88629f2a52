"""Plans how live tensors are copied into each slot. A plan is kept as long as tensors and slots stay the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.stage import cuda_copy, staging
from holdfast.stage.background_copy import Lateness, Move, Track, lay_tracks
from holdfast.stage.cuda_copy import DeviceLoad, Lane, SideStream
from holdfast.stage.slots import Slot, Slots
from holdfast.stage.staging import ALIGNMENT_BYTES, Copy, SlotLayout
from holdfast.threads import own_threads

PARCEL_BYTES_MAX = 4096  # copying a tensor of up to this size at the call costs less than watching it
_GAP = np.zeros(ALIGNMENT_BYTES, np.uint8)


class Parcel(NamedTuple):
    """Small tensors that are next to each other in the slot, with the gaps between them: one call copies all."""

    sources: list[NDArray[Any]]
    target: NDArray[Any]

    def copy(self) -> None:
        np.concatenate(self.sources, out=self.target)


class CopyPlan(NamedTuple):
    """How one layout is copied into one slot: which tensors at once, and which in the background."""

    parcels: tuple[Parcel, ...]
    at_once: tuple[Move, ...]
    tracks: tuple[Track, ...]
    lanes: tuple[Lane, ...]  # for GPUs

    def copy_at_once(self) -> None:
        """Copy everything that is small or that training may change at any time. Lanes copy these in their own turn."""
        for parcel in self.parcels:
            parcel.copy()
        _copy(self.at_once)

    def forget(self) -> None:
        """Slot or tensors have other bytes than at the last save."""
        for track in self.tracks:
            track.forget()


NO_PLAN = CopyPlan((), (), (), ())


def _copy(moves: Sequence[Move]) -> None:
    with torch.no_grad():
        for move in moves:
            move.target.copy_(move.source)


class CopyPlans:
    """The copy plans of all slots. They keep the memory of their source tensors alive until a later save finds others."""

    def __init__(self) -> None:
        self._slots: object = None
        self._laid: dict[int, tuple[Sequence[Copy], CopyPlan]] = {}
        self._emptied: dict[int, int] = {}  # how often each slot had lost its memory at the last save
        self._sides: dict[torch.device, SideStream] = {}
        self._lateness = Lateness()

    def into(self, slot: Slot, layout: SlotLayout) -> CopyPlan:
        """The plan of this layout for this slot."""
        plan, emptied = self._into(slot.slots, slot.index, slot.data, layout), slot.slots.emptied(slot.index)
        if self._emptied.get(slot.index, emptied) != emptied:
            plan.forget()
        self._emptied[slot.index] = emptied
        return plan

    def onto(self, home: object, data: memoryview, copies: Sequence[Copy]) -> CopyPlan:
        """The plan of these copies into memory outside `Slots`; `home` is its key."""
        return self._into(home, 0, data, staging.NOTHING._replace(copies=tuple(copies), steady=len(copies)))

    def lay_ahead(self, slots: Slots, layout: SlotLayout) -> None:
        """Make the plans for all slots now, so that the first saves find them ready."""
        with own_threads.computing():
            for index in range(slots.geometry.slots):
                self._into(slots, index, slots.data(index), layout)

    def forget(self) -> None:
        """The tensors have other bytes now, as after a restore."""
        for _, plan in self._laid.values():
            plan.forget()

    def _into(self, slots: object, index: int, data: memoryview, layout: SlotLayout) -> CopyPlan:
        if slots is not self._slots:
            self._slots = slots
            self._laid.clear()
            self._emptied.clear()
        steady, rest = layout.copies[: layout.steady], layout.copies[layout.steady :]
        before, plan = self._laid.get(index, ((), NO_PLAN))
        if len(before) != len(steady) or not all(map(is_, before, steady)):
            plan = self._lay(steady, data)
            self._laid[index] = steady, plan
        more = self._lay(rest, data)
        return CopyPlan(
            plan.parcels + more.parcels,
            plan.at_once + more.at_once,
            plan.tracks + more.tracks,
            plan.lanes + more.lanes,
        )

    def _lay(self, copies: Sequence[Copy], data: memoryview) -> CopyPlan:
        loads: dict[torch.device | None, DeviceLoad] = defaultdict(lambda: DeviceLoad([], [], []))
        frozen: list[Move] = []
        for copy, move in staging.place(copies, data):
            home = move.source.device
            load = loads[home if home.type in cuda_copy.KINDS else None]
            if home.type in ("cpu", *cuda_copy.KINDS) and _is_small(move):
                load.small.append((copy.slot_offset, move))
            elif copy.frozen and not copy.restless and home.type == "cpu":
                frozen.append(move)
            else:
                (load.at_once if copy.restless else load.behind).append(move)
        small, at_once, watched = loads.pop(None, DeviceLoad([], [], []))
        lanes = [Lane(self._side(home), load, data) for home, load in loads.items() if home is not None]
        tracks = (*lay_tracks(watched), *lay_tracks(frozen, self._lateness))
        return CopyPlan(tuple(_pack(small, data)), tuple(at_once), tracks, tuple(lanes))

    def _side(self, home: torch.device) -> SideStream:
        """The side stream of a device, shared by all saves of this checkpointer: each save is enqueued whole."""
        if home not in self._sides:
            self._sides[home] = SideStream(home)
        return self._sides[home]


def _is_small(move: Move) -> bool:
    octets = move.source.dtype is torch.uint8 and move.source.dim() == 1 and move.source.is_contiguous()
    return octets and move.nbytes <= PARCEL_BYTES_MAX


def _pack(small: Sequence[tuple[int, Move]], data: memoryview) -> Iterator[Parcel]:
    """Make parcels of neighbours, in the order of the slot. Gaps left by alignment are filled with zeros."""
    slot = np.frombuffer(data, np.uint8)
    sources: list[NDArray[Any]] = []
    first = end = 0
    for offset, move in small:
        if sources and not 0 <= offset - end < ALIGNMENT_BYTES:
            yield Parcel(sources, slot[first:end])
            sources = []
        if not sources:
            first = end = offset
        if offset > end:
            sources.append(_GAP[: offset - end])
        sources.append(move.source.numpy())
        end = offset + move.nbytes
    if sources:
        yield Parcel(sources, slot[first:end])
