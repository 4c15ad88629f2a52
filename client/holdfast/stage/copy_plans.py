"""Plans how live tensors are copied into each slot. A plan is kept as long as tensors and slots stay the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
import torch

from holdfast.memory.native_copy import PairCopies
from holdfast.stage import cuda_copy, staging
from holdfast.stage.background_copy import Lateness, Move, Samples, Track, TrackSources, lay_tracks
from holdfast.stage.cuda_copy import DeviceLoad, Lane, SideStream
from holdfast.stage.slots import Slot, Slots
from holdfast.stage.staging import ALIGNMENT_BYTES, Copy, SlotLayout
from holdfast.stage.strided_moves import Pair
from holdfast.threads import own_threads

SMALL_BYTES_MAX = 4096  # copying a tensor of up to this size at the call costs less than watching it
_GAP = np.zeros(ALIGNMENT_BYTES, np.uint8)


class CopyPlan(NamedTuple):
    """How one layout is copied into one slot: which tensors at once, and which in the background."""

    small: tuple[PairCopies, ...]  # tensors with the gaps between them: one call copies all
    at_once: tuple[Move, ...]
    tracks: tuple[Track, ...]
    lanes: tuple[Lane, ...]  # for GPUs
    changing: TrackSources = TrackSources(())  # of the first tracks: those of tensors that are not frozen and probably stay
    samples: Samples | None = None  # of these, if they were read ahead

    def copy_at_once(self) -> None:
        """Copy everything that is small or that training may change at any time. Lanes copy these in their own turn."""
        for small in self.small:
            small.do()
        _copy(self.at_once)

    def forget(self) -> None:
        """Slot or tensors have other bytes than at the last save."""
        for track in self.tracks:
            track.forget()


class _Sampled(NamedTuple):
    layout: SlotLayout
    samples: Samples


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
        self._sampled: _Sampled | None = None

    def sample(self, layout: SlotLayout) -> None:
        """Read samples of the tensors of a layout that is next brought `into` a slot, while the daemon leases one. Tensors
        that no slot had yet are left.
        """
        steady, self._sampled = layout.copies[: layout.steady], None
        for before, plan in self._laid.values():
            if _identical(before, steady):
                self._sampled = _Sampled(layout, plan.changing.sample())
                return

    def into(self, slot: Slot, layout: SlotLayout) -> CopyPlan:
        """The plan of this layout for this slot."""
        plan, emptied = self._into(slot.slots, slot.index, slot.data, layout), slot.slots.emptied(slot.index)
        if self._emptied.get(slot.index, emptied) != emptied:
            plan.forget()
        self._emptied[slot.index] = emptied
        sampled, self._sampled = self._sampled, None
        return plan._replace(samples=sampled.samples) if sampled is not None and sampled.layout is layout else plan

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
        if not _identical(before, steady):
            plan = self._lay(steady, data)
            self._laid[index] = steady, plan
        more = self._lay(rest, data)
        return CopyPlan(
            plan.small + more.small,
            plan.at_once + more.at_once,
            plan.tracks + more.tracks,
            plan.lanes + more.lanes,
            plan.changing,
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
        changing = lay_tracks(watched)
        tracks = (*changing, *lay_tracks(frozen, self._lateness))
        packed = (PairCopies(list(_pack(small, data))),) if small else ()
        return CopyPlan(packed, tuple(at_once), tracks, tuple(lanes), TrackSources(changing))

    def _side(self, home: torch.device) -> SideStream:
        """The side stream of a device, shared by all saves of this checkpointer: each save is enqueued whole."""
        if home not in self._sides:
            self._sides[home] = SideStream(home)
        return self._sides[home]


def _identical(before: Sequence[Copy], now: Sequence[Copy]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _is_small(move: Move) -> bool:
    octets = move.source.dtype is torch.uint8 and move.source.dim() == 1 and move.source.is_contiguous()
    return octets and move.nbytes <= SMALL_BYTES_MAX


def _pack(small: Sequence[tuple[int, Move]], data: memoryview) -> Iterator[Pair]:
    """Targets and sources in the order of the slot. Short gaps, left by alignment, are filled with zeros."""
    slot = np.frombuffer(data, np.uint8)
    end = None
    for offset, move in small:
        if end is not None and 0 < offset - end < ALIGNMENT_BYTES:
            yield slot[end:offset], _GAP[: offset - end]
        end = offset + move.nbytes
        yield slot[offset:end], move.source.numpy()
