"""What is held: the newest commit of every run stays in the slots it came from until they are needed for something else.

A held slot is free, and leased last. So the newest checkpoint stands in memory at no cost, and a trainer that was killed
finds it there when it is started again. When the ranks are gone, the hold keeps their memory for them, for a while.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.wire import HELD_RANKS_MAX, HeldPart
from holdfast_service.daemon.arena.segment import ArenaSegment, SealedSlot

log = logging.getLogger(__name__)

HELD_S = 600.0  # how long memory of ranks that are gone waits for them to be started again


class _Part(NamedTuple):
    segment: ArenaSegment
    slot: int


class _Hold:
    """One committed step: the slot of every rank of its world."""

    def __init__(self, run: str, step: int, attempt: int, parts: Mapping[int, _Part]) -> None:
        self.run, self.step, self.attempt, self.parts = run, step, attempt, dict(sorted(parts.items()))
        self.alone_since: float | None = None  # time.monotonic(), once a rank is gone
        self.successors: set[tuple[int, int]] = set()  # (attempt, rank) that have memory of their own

    @property
    def alone(self) -> bool:
        """Whether memory is kept for a rank that is gone."""
        return any(part.segment.retired for part in self.parts.values())


class HeldCheckpoints:
    """The held commit of each run. Safe for threads. `committed` is by whose attempt and turn a step is a checkpoint."""

    def __init__(self, committed: Callable[[str, int], tuple[int, int] | None]) -> None:
        self._committed = committed
        self._lock = threading.Lock()
        self._held: dict[str, _Hold] = {}

    @property
    def awaiting(self) -> bool:
        """Whether memory is kept for ranks that are gone and may be started again."""
        with self._lock:
            return any(hold.alone for hold in self._held.values())

    def keep(self, run: str, step: int, attempt: int, slots: Mapping[int, SealedSlot]) -> None:
        """A step was committed from these slots, which are about to be released: they are held, and an older step no more.

        Memory of ranks that share none with us is not held: nobody could read it. Nor is what was staged on disk, nor a
        segment that its rank has outgrown: memory must not double.
        """
        if all(_can_be_held(sealed.segment) for sealed in slots.values()):
            self._hold(_Hold(run, step, attempt, {rank: _Part(s.segment, s.slot) for rank, s in slots.items()}))
        else:
            self.end(run)

    def find(self, segments: Iterable[ArenaSegment]) -> None:
        """At start: hold what an earlier daemon had committed from these segments, as far as it still stands there whole."""
        found: dict[tuple[str, int, int, int], dict[int, _Part]] = {}
        for segment in segments:
            owner = segment.owner
            for slot in range(segment.geometry.slots):
                step = _left_in(segment, slot) if owner is not None and not segment.spilled else None
                if owner is not None and step is not None:
                    found.setdefault((owner.run, step, owner.attempt, owner.world), {})[owner.rank] = _Part(segment, slot)
        for (run, step, attempt, world), parts in sorted(found.items(), key=lambda item: item[0], reverse=True):
            if run not in self._held and len(parts) == world and (self._committed(run, step) or (None,))[0] == attempt:
                self._hold(_Hold(run, step, attempt, parts))

    def lend(self, run: str, step: int) -> tuple[tuple[HeldPart, ...], tuple[int, ...]]:
        """The parts of this step and their descriptors, which the caller closes; nothing when the step is not held."""
        with self._lock:
            hold = self._held.get(run)
            if hold is None or hold.step != step or len(hold.parts) > HELD_RANKS_MAX:
                return (), ()
            parts = []
            for rank, (segment, slot) in hold.parts.items():
                seal = arena.read_header(segment.memory, segment.geometry, slot).seal
                parts.append(HeldPart(rank=rank, slot=slot, table_digest=f"{seal:016x}"))
            return tuple(parts), tuple(os.dup(part.segment.fd) for part in hold.parts.values())

    def end(self, run: str) -> None:
        """Hold nothing of this run any more."""
        with self._lock:
            hold = self._held.pop(run, None)
        if hold is not None:
            self._release(hold)

    def succeeded(self, owner: SegmentOwner) -> None:
        """A rank of a later attempt has its slots. With the last one, memory that none of them took over is given back."""
        with self._lock:
            hold = self._held.get(owner.run)
            if hold is None or owner.attempt <= hold.attempt:
                return
            hold.successors.add((owner.attempt, owner.rank))
            complete = all((owner.attempt, rank) in hold.successors for rank in range(owner.world))
        if complete and hold.alone:
            self._end(hold)

    def make_room(self) -> None:
        """Shared memory is needed: what is kept for ranks that are gone is given back."""
        with self._lock:
            alone = [hold for hold in self._held.values() if hold.alone]
        for hold in alone:
            log.info("%s@%s is held no more: its memory is needed", hold.run, hold.step)
            self._end(hold)

    def expire(self, now: float) -> None:
        """Give up the holds whose ranks have been gone for too long by `now`, or whose checkpoint is gone."""
        with self._lock:
            holds = list(self._held.values())
        for hold in holds:
            if not hold.alone:
                hold.alone_since = None
                continue
            if hold.alone_since is None:
                hold.alone_since = now
            if now - hold.alone_since > HELD_S or (self._committed(hold.run, hold.step) or (None,))[0] != hold.attempt:
                self._end(hold)

    def close(self) -> None:
        """Hold nothing any more."""
        for run in list(self._held):
            self.end(run)

    def _hold(self, hold: _Hold) -> None:
        """From here on this is what is held of its run."""
        with self._lock:
            before = self._held.get(hold.run)
            self._held[hold.run] = hold
        if before is not None:
            self._release(before)
        for segment, slot in hold.parts.values():
            segment.keep(slot, lambda: self._end(hold))

    def _end(self, hold: _Hold) -> None:
        with self._lock:
            if self._held.get(hold.run) is hold:
                del self._held[hold.run]
        self._release(hold)

    def _release(self, hold: _Hold) -> None:
        for segment, slot in hold.parts.values():
            segment.unkeep(slot)


def _can_be_held(segment: ArenaSegment) -> bool:
    return segment.owner is not None and not segment.spilled and not segment.outgrown


def _left_in(segment: ArenaSegment, slot: int) -> int | None:
    """The step that was last saved from a free slot, if header and table still agree about it."""
    try:
        header = arena.read_header(segment.memory, segment.geometry, slot)
        if header.state is not SlotState.FREE or segment.owner is None or header.attempt != segment.owner.attempt:
            return None
        start = segment.geometry.table_offset(slot)
        whole = header.table_bytes and digest(segment.memory[start : start + header.table_bytes]) == f"{header.seal:016x}"
    except CheckpointError:
        return None
    return header.step if whole else None
