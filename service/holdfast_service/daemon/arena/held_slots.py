"""In-memory checkpoints: the newest commit of every run stays in the slots it came from, until they are needed.

Such a slot is free, and leased last. So the newest checkpoint stays in memory at no cost, and a restarted trainer
restores from it. When the ranks are gone, their memory is kept for them for a while.
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
    """One committed step: the slots of all ranks of its world."""

    def __init__(self, run: str, step: int, attempt: int, parts: Mapping[int, _Part]) -> None:
        self.run, self.step, self.attempt, self.parts = run, step, attempt, dict(sorted(parts.items()))
        self.alone_since: float | None = None  # time.monotonic(), once a rank is gone
        self.successors: set[tuple[int, int]] = set()  # (attempt, rank) that have memory of their own

    @property
    def alone(self) -> bool:
        """Whether memory is kept for a rank that is gone."""
        return any(part.segment.retired for part in self.parts.values())


class HeldCheckpoints:
    """The in-memory checkpoint of each run. Safe for threads. `committed` returns the attempt and turn by which a
    step is a checkpoint.
    """

    def __init__(self, committed: Callable[[str, int], tuple[int, int] | None]) -> None:
        self._committed = committed
        self._lock = threading.Lock()
        self._held: dict[str, _Hold] = {}

    @property
    def awaiting(self) -> bool:
        """Whether memory is kept for ranks that are gone and may be restarted."""
        with self._lock:
            return any(hold.alone for hold in self._held.values())

    def keep(self, run: str, step: int, attempt: int, slots: Mapping[int, SealedSlot]) -> None:
        """A step was committed from these slots, which are about to be released: keep it as the in-memory checkpoint
        instead of an older step.

        Not kept: slots of ranks without shared memory, because nobody could read them; data staged on disk; and
        segments that are being replaced by larger ones, because memory must not double.
        """
        if all(_can_be_held(sealed.segment) for sealed in slots.values()):
            self._hold(_Hold(run, step, attempt, {rank: _Part(s.segment, s.slot) for rank, s in slots.items()}))
        else:
            self.end(run)

    def find(self, segments: Iterable[ArenaSegment]) -> None:
        """At start: keep the steps that an earlier daemon committed from these segments, if they are still
        complete.
        """
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
        """The parts of this step and their descriptors, which the caller closes; empty if the step is not in
        memory.
        """
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
        """Drop the in-memory checkpoint of this run."""
        with self._lock:
            hold = self._held.pop(run, None)
        if hold is not None:
            self._release(hold)

    def succeeded(self, owner: SegmentOwner) -> None:
        """A rank of a later attempt has its slots. With the last rank, memory that none of them took over is
        freed.
        """
        with self._lock:
            hold = self._held.get(owner.run)
            if hold is None or owner.attempt <= hold.attempt:
                return
            hold.successors.add((owner.attempt, owner.rank))
            complete = all((owner.attempt, rank) in hold.successors for rank in range(owner.world))
        if complete and hold.alone:
            self._end(hold)

    def make_room(self) -> None:
        """Shared memory is needed: free what is kept for ranks that are gone."""
        with self._lock:
            alone = [hold for hold in self._held.values() if hold.alone]
        for hold in alone:
            log.info("dropped the in-memory checkpoint %s@%s: its memory is needed", hold.run, hold.step)
            self._end(hold)

    def expire(self, now: float) -> None:
        """Drop in-memory checkpoints whose ranks have been gone for too long by `now`, or whose checkpoint was
        removed.
        """
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
        """Drop everything."""
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
