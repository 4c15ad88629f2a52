"""In-memory checkpoints: the newest commit of every run stays in its slots, until they are needed.

Such a slot is free, and of those with memory leased last. So the newest checkpoint stays in memory at no cost, at least
until the next save begins, and a restarted trainer restores from it. When the ranks are gone, their memory is kept for them
for a while. With ranks on several nodes, each node holds its own ranks' slots, and other nodes read them (`exchange`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast_formats import decoding
from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import Key as Launch
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.wire import HELD_RANKS_MAX, HeldPart
from holdfast_service.daemon.arena.segment import ArenaSegment, SealedSlot

log = logging.getLogger(__name__)

HELD_S = 600.0  # how long memory of ranks that are gone waits for them to be started again


class MemoryStep(NamedTuple):
    """Identifies a committed save: there may be others of its step, of another attempt or turn."""

    run: str
    step: int
    attempt: int
    turn: int
    world: int

    @property
    def launch(self) -> Launch:
        return self.attempt, self.turn


class MemoryUse(NamedTuple):
    """What a node holds of a step: how many of its ranks' slots, and their bytes."""

    step: MemoryStep
    ranks: int
    bytes: int


class _Part(NamedTuple):
    segment: ArenaSegment
    slot: int

    @property
    def header(self) -> SlotHeader:
        return arena.read_header(self.segment.memory, self.segment.geometry, self.slot)


class _Hold:
    """The slots of a committed step: of all ranks, or of those on this node."""

    def __init__(self, of: MemoryStep, parts: Mapping[int, _Part]) -> None:
        self.of, self.parts = of, dict(sorted(parts.items()))
        self._alone_since: float | None = None  # time.monotonic(), once a rank is gone
        self.successors: set[tuple[int, int]] = set()  # (attempt, rank) that have memory of their own
        self.overwritten = False  # only memory is kept, for the successors of ranks that are gone

    @property
    def alone(self) -> bool:
        """Whether memory is kept for a rank that is gone."""
        return any(part.segment.retired for part in self.parts.values())

    def alone_s(self, now: float) -> float | None:
        """For how long the looks until `now` have found it alone, in seconds; None if it is not."""
        since = now if self._alone_since is None else self._alone_since
        self._alone_since = since if self.alone else None
        return None if self._alone_since is None else now - since


class LentSlot:
    """A held slot that another node reads, without a lock: the reader calls `is_still` afterwards, and discards the bytes if
    it is False.
    """

    def __init__(self, rank: int, part: _Part, is_held: Callable[[], bool]) -> None:
        """`CheckpointError` for a slot that is no longer held."""
        self.rank, self._part, self._is_held = rank, part, is_held
        self._header = part.header
        segment, slot = part.segment, part.slot
        self.table_at = segment.geometry.data_bytes  # counted from the first byte of data, as all places in a slot
        self.data_bytes, self.table_bytes = self._header.data_bytes, self._header.table_bytes
        start = segment.geometry.data_offset(slot)
        self.memory = segment.memory[start : start + self.table_at + segment.geometry.table_bytes_max]

    @property
    def table_digest(self) -> str:
        return f"{self._header.seal:016x}"

    def has(self, begin: int, end: int) -> bool:
        """Whether the rank's data or table covers this range."""
        return 0 <= begin < end <= self.data_bytes or self.table_at <= begin < end <= self.table_at + self.table_bytes

    def is_still(self) -> bool:
        """Whether it is unchanged since it was lent, so that bytes read before are the committed ones."""
        try:
            return self._is_held() and self._part.header == self._header
        except CheckpointError:
            return False


class MemoryCheckpoints:
    """The in-memory checkpoint of each run. Thread-safe. `committed` returns the attempt and turn of a step's checkpoint."""

    def __init__(self, committed: Callable[[str, int], tuple[int, int] | None], partly: bool = False) -> None:
        """`partly`: other nodes may hold slots of their ranks."""
        self._committed, self._partly = committed, partly
        self._lock = threading.Lock()
        self._held: dict[str, _Hold] = {}

    @property
    def awaiting(self) -> bool:
        """Whether memory is kept for ranks that are gone and may be restarted."""
        with self._lock:
            return any(hold.alone for hold in self._held.values())

    def keep(self, run: str, step: int, attempt: int, slots: Mapping[int, SealedSlot]) -> bool:
        """A step was committed from these slots, which are about to be released: keep it as the in-memory checkpoint instead
        of an older step. Returns whether it is kept.

        Not kept: slots of ranks without shared memory, which no rank could read; data staged on disk; and segments that are
        being replaced by larger ones, because memory must not double.
        """
        if slots and all(_can_be_held(sealed.segment) for sealed in slots.values()):
            table = next(iter(slots.values())).table
            of = MemoryStep(run, step, attempt, table.turn, table.world)
            self._hold(_Hold(of, {rank: _Part(s.segment, s.slot) for rank, s in slots.items()}))
            return True
        self.end(run)
        return False

    def find(self, segments: Iterable[ArenaSegment]) -> None:
        """At start: keep the steps that an earlier daemon committed from these segments, if they are complete here, or other
        nodes may have the rest.

        Nothing is kept of a step that a rank seems to have saved twice: one of the two was not committed.
        """
        parts_by_step: dict[MemoryStep, dict[int, list[_Part]]] = {}
        for segment in segments:
            for slot in range(segment.geometry.slots):
                of = None if segment.spilled else _left_in(segment, slot)
                if of is not None and segment.owner is not None:
                    parts_by_step.setdefault(of, {}).setdefault(segment.owner.rank, []).append(_Part(segment, slot))
        for of, parts in sorted(parts_by_step.items(), reverse=True):
            single = {rank: some[0] for rank, some in parts.items() if len(some) == 1}
            enough = len(single) == len(parts) if self._partly else len(single) == of.world
            if of.run not in self._held and enough and self._committed(of.run, of.step) == of.launch:
                self._hold(_Hold(of, single))

    def lend(self, run: str, step: int) -> tuple[tuple[HeldPart, ...], tuple[int, ...]]:
        """The parts of this step that are here and their descriptors, which the caller closes; empty if the step is not in
        memory.
        """
        with self._lock:
            hold = self._held.get(run)
            if hold is None or hold.overwritten or hold.of.step != step or len(hold.parts) > HELD_RANKS_MAX:
                return (), ()
            parts = [
                HeldPart(rank=rank, slot=part.slot, table_digest=f"{part.header.seal:016x}")
                for rank, part in hold.parts.items()
            ]
            return tuple(parts), tuple(os.dup(part.segment.fd) for part in hold.parts.values())

    def lent(self, of: MemoryStep) -> list[LentSlot]:
        """The slots of this save that are here, for another node; empty if it is not in memory."""
        with self._lock:
            hold = self._held.get(of.run)
            if hold is None or hold.overwritten or hold.of != of:
                return []
            slots = []
            for rank, part in hold.parts.items():
                with suppress(CheckpointError):  # its rank has written over the header
                    slots.append(LentSlot(rank, part, lambda: self._is_held(hold)))
            return slots

    def report(self) -> list[MemoryUse]:
        """Held memory by run."""
        with self._lock:
            holds = sorted((hold for hold in self._held.values() if not hold.overwritten), key=lambda hold: hold.of)
        uses = []
        for hold in holds:
            size = 0
            for part in hold.parts.values():
                with suppress(CheckpointError):  # its rank has written over the header
                    size += part.header.data_bytes + part.header.table_bytes
            uses.append(MemoryUse(hold.of, len(hold.parts), size))
        return uses

    def end(self, run: str) -> None:
        with self._lock:
            hold = self._held.pop(run, None)
        if hold is not None:
            self._release(hold)

    def succeeded(self, owner: SegmentOwner) -> None:
        """A rank of a later attempt has its slots. With the last rank, memory that none of them took over is freed."""
        self._freed_after(owner, range(owner.world))

    def trains(self, owner: SegmentOwner, here: Collection[int]) -> None:
        """A rank of a later attempt saves, so all of its launch have restored, on other nodes too. With the last one of
        those that are `here`, memory that none of them took over is freed. Without other nodes, all of them will be here.
        """
        self._freed_after(owner, here if self._partly else range(owner.world))

    def _freed_after(self, owner: SegmentOwner, ranks: Iterable[int]) -> None:
        with self._lock:
            hold = self._held.get(owner.run)
            if hold is None or owner.attempt <= hold.of.attempt:
                return
            hold.successors.add((owner.attempt, owner.rank))
            complete = all((owner.attempt, rank) in hold.successors for rank in ranks)
        if complete and hold.alone:
            self._end(hold)

    def make_room(self) -> None:
        """Shared memory is needed: free what is kept for ranks that are gone."""
        with self._lock:
            alone = [hold for hold in self._held.values() if hold.alone]
        for hold in alone:
            log.info("dropped the in-memory checkpoint %s@%s: its memory is needed", hold.of.run, hold.of.step)
            self._end(hold)

    def expire(self, now: float) -> None:
        """Drop in-memory checkpoints whose ranks have been gone for too long by `now`, or whose checkpoint was removed."""
        with self._lock:
            holds = list(self._held.values())
        for hold in holds:
            alone_s = hold.alone_s(now)
            if alone_s is not None and (alone_s > HELD_S or self._committed(hold.of.run, hold.of.step) != hold.of.launch):
                self._end(hold)

    def close(self) -> None:
        """Drop everything."""
        for run in list(self._held):
            self.end(run)

    def _hold(self, hold: _Hold) -> None:
        """Hold this step of its run instead of any other."""
        with self._lock:
            before = self._held.get(hold.of.run)
            self._held[hold.of.run] = hold
        if before is not None:
            self._release(before)
        for segment, slot in hold.parts.values():
            segment.keep(slot, lambda: self._overwrite(hold))

    def _is_held(self, hold: _Hold) -> bool:
        return self._held.get(hold.of.run) is hold and not hold.overwritten

    def _overwrite(self, hold: _Hold) -> None:
        """A rank has leased its slot: the step is no longer in memory. The memory of ranks that are gone stays for their
        successors, which may reserve later than this rank.
        """
        with self._lock:
            hold.overwritten = True
            gone = [part for part in hold.parts.values() if part.segment.retired]
            if not gone and self._held.get(hold.of.run) is hold:
                del self._held[hold.of.run]
        for part in hold.parts.values():
            if part not in gone:
                part.segment.unkeep(part.slot)

    def _end(self, hold: _Hold) -> None:
        with self._lock:
            if self._held.get(hold.of.run) is hold:
                del self._held[hold.of.run]
        self._release(hold)

    def _release(self, hold: _Hold) -> None:
        for segment, slot in hold.parts.values():
            segment.unkeep(slot)


def _can_be_held(segment: ArenaSegment) -> bool:
    return segment.owner is not None and not segment.spilled and not segment.outgrown


class _Turn(msgspec.Struct, frozen=True):
    """Decodes only this field of a table, which may be long."""

    turn: int = 0


_decode_turn = decoding.decoder(_Turn)


def _left_in(segment: ArenaSegment, slot: int) -> MemoryStep | None:
    """The save that a free slot was last used for, if header and table still agree about it."""
    owner = segment.owner
    try:
        header = arena.read_header(segment.memory, segment.geometry, slot)
        if header.state is not SlotState.FREE or owner is None or header.attempt != owner.attempt:
            return None
        start = segment.geometry.table_offset(slot)
        whole = header.table_bytes and digest(segment.memory[start : start + header.table_bytes]) == f"{header.seal:016x}"
        if not whole:
            return None
        turn = _decode_turn(segment.memory[start : start + header.table_bytes]).turn
    except (CheckpointError, msgspec.DecodeError, ValueError):
        return None
    return MemoryStep(owner.run, header.step, header.attempt, turn, owner.world)
