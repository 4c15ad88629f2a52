"""The node's shared memory. The daemon makes it, hands it to ranks as a memfd, and keeps it when they die."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable

from holdfast_formats import arena, table
from holdfast_formats.arena import Geometry, Owner, SlotHeader, SlotState
from holdfast_formats.digest import digest
from holdfast_formats.errors import ArenaFull, CheckpointError, InvalidRequest, NoSpace, StateMismatch
from holdfast_formats.table import SlotTable
from holdfast_service.storage import scratch

from .budget import Budget, Room, fitting
from .keeping import Keeper
from .spill import Spill, emptier, fewer_notice, refusal

log = logging.getLogger(__name__)

LEASE_DEADLINE_S = 600.0
OUTGROWN_WAIT_S = 30.0  # how long a rank's new segment waits for its old one, where memory has no room for both


class Segment:
    """One rank's shared memory: its slots, and which of them are free. Owns the mapping; closes it when nobody looks.

    A spilled one is a file on the storage's disk. `notice` is what its rank should know of how it was made.
    """

    def __init__(self, fd: int, geometry: Geometry, owner: Owner | None, name: str, spilled: bool = False) -> None:
        self.fd, self.geometry, self.owner, self.name = fd, geometry, owner, name
        self.spilled, self.notice = spilled, ""
        self._empty: Callable[[int], None] = emptier(fd, geometry) if spilled else lambda slot: None
        self.user: object = None  # the conversation that uses it now
        try:
            self._map = mmap.mmap(fd, geometry.segment_bytes)
        except OSError as error:
            raise NoSpace(f"cannot map {geometry.segment_bytes} bytes: {error.strerror}", hint=_MEMORY_HINT) from error
        self.memory = memoryview(self._map)
        self._free = set(range(geometry.slots))
        self._when_idle: Callable[[], None] | None = None
        self._changed = threading.Condition()

    @classmethod
    def make(cls, fd: int, geometry: Geometry, owner: Owner | None, spilled: bool = False) -> Segment:
        """A new one in what `fd` is of, all slots free. The descriptor is the segment's, also if this raises."""
        try:
            made = cls(fd, geometry, owner, uuid.uuid4().hex, spilled)
        except NoSpace:
            os.close(fd)
            raise
        arena.write_superblock(made.memory, geometry, owner)
        for slot in range(geometry.slots):
            arena.write_header(made.memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
        return made

    @classmethod
    def adopt(cls, fd: int, name: str) -> Segment:
        """One that another daemon made: leased and sealed slots stay taken. `InvalidRequest` for what is not one of ours.

        The descriptor is the segment's only if this returns.
        """
        spilled = _is_spilled(fd)
        with mmap.mmap(fd, arena.PAGE_BYTES, prot=mmap.PROT_READ) as page, memoryview(page) as seen:
            geometry, owner = arena.read_measures(seen), arena.read_owner(seen)
        if geometry.segment_bytes > os.fstat(fd).st_size:
            raise InvalidRequest("a staging arena that is cut short")
        found = cls(fd, geometry, owner, name, spilled)
        for slot in range(geometry.slots):
            if found.state(slot) is not SlotState.FREE:
                found._free.remove(slot)
        return found

    def is_at(self, fd: int) -> bool:
        """Whether a descriptor is of this very memory."""
        mine, other = os.fstat(self.fd), os.fstat(fd)
        return (mine.st_dev, mine.st_ino) == (other.st_dev, other.st_ino)

    def state(self, slot: int) -> SlotState:
        """What a slot's header says; a header that is not one is made a free slot's."""
        try:
            return arena.read_header(self.memory, self.geometry, slot).state
        except InvalidRequest:
            arena.write_header(self.memory, self.geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
            return SlotState.FREE

    def disown(self, slot: int) -> None:
        """A rank declares a slot sealed that it does not hold: whatever its header says now, it is free."""
        with self._changed:
            if slot in self._free:
                arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)

    def lease(self, step: int, attempt: int, wait_s: float) -> int:
        """A free slot, now leased for `step`; waits up to `wait_s` seconds for one, then `ArenaFull`."""
        limit = time.monotonic() + wait_s
        with self._changed:
            while not self._free:
                if not self._changed.wait(max(limit - time.monotonic(), 0)) and time.monotonic() >= limit:
                    raise ArenaFull(
                        f"all {self.geometry.slots} slots hold saves that storage has not taken yet",
                        hint="save less often, or give the arena more slots",
                    )
            slot = min(self._free)
            self._free.remove(slot)
        self._empty(slot)
        arena.write_header(self.memory, self.geometry, slot, SlotHeader(SlotState.LEASED, step, attempt, 0, 0, 0))
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; doing so twice is harmless."""
        arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)
        with self._changed:
            self._free.add(slot)
            self._changed.notify_all()
            idle = self._when_idle if len(self._free) == self.geometry.slots else None
        if idle is not None:
            idle()

    @property
    def touched_bytes(self) -> int:
        """How much of it is in memory, or on the disk, by now."""
        return min(os.fstat(self.fd).st_blocks * 512, self.geometry.segment_bytes)

    @property
    def retired(self) -> bool:
        return self._when_idle is not None

    def revive(self) -> None:
        """Its rank is back: the segment stays when it falls idle."""
        with self._changed:
            self._when_idle = None

    def retire(self, when_idle: Callable[[], None]) -> None:
        """Call `when_idle` as soon as no slot is leased or sealed any more: now, or at the last release."""
        with self._changed:
            self._when_idle = when_idle
            idle = len(self._free) == self.geometry.slots
        if idle:
            when_idle()

    def take_sealed(self, slot: int, step: int, table_digest: str) -> SealedSlot:
        """What a sealed slot holds, proven by its header, its seal word and its table's digest; `InvalidRequest` if not."""
        if not 0 <= slot < self.geometry.slots:
            raise InvalidRequest(f"there is no slot {slot}")
        header = arena.read_header(self.memory, self.geometry, slot)
        if header.state is not SlotState.SEALED or header.step != step:
            raise InvalidRequest(f"slot {slot} is {header.state.name.lower()} for step {header.step}, not sealed for {step}")
        start = self.geometry.table_offset(slot)
        encoded = bytes(self.memory[start : start + header.table_bytes])
        if digest(encoded) != table_digest or int(table_digest, 16) != header.seal:
            raise InvalidRequest(f"slot {slot}: the table does not have the digest it was sealed with")
        data_start = self.geometry.data_offset(slot)
        data = self.memory[data_start : data_start + header.data_bytes]
        return SealedSlot(self, slot, table.decode(encoded, header.data_bytes), data)

    def give_back(self) -> None:
        """Empty all slots, so that memory is free though others map it. Superblock and headers stay as they are."""
        if self.spilled:
            return  # its blocks stay reserved: a late write into it must not want for one
        for slot in range(self.geometry.slots):
            size = self.geometry.slot_bytes - arena.PAGE_BYTES
            self._map.madvise(mmap.MADV_REMOVE, self.geometry.data_offset(slot), size)

    def close(self) -> None:
        """Give the memory back to the machine, once the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SealedSlot:
    """A complete slot: its decoded table and its data. Read-only by agreement until it is released."""

    def __init__(self, segment: Segment, slot: int, slot_table: SlotTable, data: memoryview) -> None:
        self.segment = segment
        self.slot = slot
        self.table = slot_table
        self.data = data

    def release(self) -> None:
        self.segment.release(self.slot)


def check_identity(sealed: SealedSlot, owner: Owner, step: int) -> None:
    """`StateMismatch` for a slot whose table is of another rank or save than the one that sealed it."""
    if (sealed.table.owner, sealed.table.step) != (owner, step):
        stated = f"{sealed.table.owner} at step {sealed.table.step}"
        raise StateMismatch(f"the slot's table is of {stated}, the rank that sealed it is {owner} at step {step}")


def find_sealed(segment: Segment, slot: int) -> SealedSlot | None:
    """What a slot holds if it is sealed, whole, and its owner's; None otherwise."""
    try:
        header = arena.read_header(segment.memory, segment.geometry, slot)
        sealed = segment.take_sealed(slot, header.step, f"{header.seal:016x}")
        if segment.owner is not None:
            check_identity(sealed, segment.owner, header.step)
    except CheckpointError as error:
        log.debug("slot %d of %s is not sealed: %s", slot, segment.owner, error.detail)
        return None
    return sealed


class Arena:
    """All segments of a node, within its budget. With a `spill`, what memory has no room for is staged on disk."""

    def __init__(self, budget: Budget, keeper: Keeper | None = None, spill: Spill | None = None) -> None:
        self._budget, self._keeper, self._spill = budget, keeper, spill
        self._lock = threading.Condition()
        self._segments: set[Segment] = set()

    @property
    def bytes(self) -> int:
        """Memory that segments take; those on disk take none."""
        with self._lock:
            return self._taken()

    def reserve(self, asked: Geometry, label: str, owner: Owner | None = None) -> Segment:
        """A new segment of as many of the slots as memory has room for, or of one on disk; `notice` says if it is not all.

        Where the owner's outgrown segment is in the way, it is waited for. `LimitExceeded`, with the numbers, when neither
        memory nor disk has room for one slot. With an owner, its descriptor is kept beyond this daemon's death.
        """
        with self._lock:
            if self._fitting(asked) < asked.slots:
                self._lock.wait_for(lambda: self._fitting(asked) == asked.slots or not self._leaving(owner), OUTGROWN_WAIT_S)
            segment = self._make(asked, label, owner)
            self._segments.add(segment)
        if segment.notice:
            log.warning("%s: %s", label, segment.notice)
        self._keep(segment)
        return segment

    def recover(self) -> list[Segment]:
        """The segments that an earlier daemon left with the keeper; what is not one of ours is let go."""
        if self._keeper is None:
            return []
        found = []
        try:
            for name, fd in self._keeper.take():
                try:
                    found.append(Segment.adopt(fd, name))
                except (CheckpointError, OSError, ValueError) as error:
                    log.warning("shared memory %s is not adopted: %s", name, error)
                    os.close(fd)
                    self._keeper.drop(name)
        except OSError as error:
            log.error("shared memory of an earlier daemon may be lost: %s", error)
        with self._lock:
            self._segments |= set(found)
        return found

    def attach(self, fd: int, owner: Owner) -> tuple[Segment, bool]:
        """The owner's segment at a descriptor, which stays the caller's, and whether this daemon did not know it before."""
        with self._lock:
            for segment in self._segments:
                if segment.owner == owner and segment.is_at(fd):
                    segment.revive()
                    return segment, False
            ours = os.dup(fd)
            try:
                segment = Segment.adopt(ours, uuid.uuid4().hex)
            except (CheckpointError, OSError, ValueError) as error:
                os.close(ours)
                raise InvalidRequest(f"the descriptor is of no staging arena: {error}") from error
            if segment.owner != owner:
                segment.close()
                raise InvalidRequest(f"{owner} brings a segment of {segment.owner}")
            self._segments.add(segment)
        self._keep(segment)
        return segment, True

    def drop(self, segment: Segment, outgrown: bool = False) -> None:
        """Nobody needs the segment any more: give its memory back once what it holds is saved.

        A rank that has outgrown it may map it still: then its pages are given back all the same.
        """
        segment.retire(lambda: self._remove(segment, outgrown))

    def _remove(self, segment: Segment, outgrown: bool) -> None:
        with self._lock:
            if segment not in self._segments or not segment.retired:
                return
            self._segments.discard(segment)
            if outgrown:
                segment.give_back()
            self._lock.notify_all()
        if self._keeper is not None and segment.owner is not None:
            try:
                self._keeper.drop(segment.name)
            except OSError as error:
                log.warning("the holder could not be told to drop %s: %s", segment.name, error)
        segment.close()

    def _make(self, asked: Geometry, label: str, owner: Owner | None) -> Segment:
        room = self._room()
        slots = fitting(asked, room)
        if slots:
            given = asked._replace(slots=slots)
            segment = Segment.make(_memfd(label, given.segment_bytes), given, owner)
            segment.notice = fewer_notice(asked, slots, room) if slots < asked.slots else ""
            return segment
        if self._spill is None:
            raise refusal(label, asked, self._taken(), room, "")
        try:
            fd, given, notice = self._spill.make(asked, room)
        except CheckpointError as error:
            raise refusal(label, asked, self._taken(), room, f"; nor can it be staged on disk: {error.detail}") from error
        segment = Segment.make(fd, given, owner, spilled=True)
        segment.notice = notice
        return segment

    def _taken(self) -> int:
        return sum(segment.geometry.segment_bytes for segment in self._segments if not segment.spilled)

    def _room(self) -> Room:
        touched = sum(segment.touched_bytes for segment in self._segments if not segment.spilled)
        return self._budget.room(self._taken(), touched)

    def _fitting(self, asked: Geometry) -> int:
        return fitting(asked, self._room())

    def _leaving(self, owner: Owner | None) -> bool:
        """Whether a segment of this rank's, be it of an earlier attempt, goes as soon as what it holds is saved."""
        who = owner and owner._replace(attempt=0)
        return any(s.retired and s.owner is not None and s.owner._replace(attempt=0) == who for s in self._segments)

    def _keep(self, segment: Segment) -> None:
        if self._keeper is None or segment.owner is None:
            return
        try:
            self._keeper.keep(segment.name, segment.fd)
        except OSError as error:
            log.warning("nobody keeps shared memory while no daemon lives, but the ranks themselves: %s", error)


_MEMORY_HINT = "free memory on this machine, or save a smaller state with fewer slots"


_MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a rank cannot pull the memory away from under the daemon


def _is_spilled(fd: int) -> bool:
    """Whether a segment is a file on disk, or memory whose size nobody can change; `InvalidRequest` for what is neither.

    Files have no seals. That ranks do not truncate theirs is trusted: they are the same user's as the daemon.
    """
    try:
        fixed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _MEMFD_SEALS == _MEMFD_SEALS
        spilled = False
    except OSError:
        fixed = spilled = scratch.is_scratch(fd)
    if not fixed:
        raise InvalidRequest("shared memory whose size can change under us is not a staging arena")
    return spilled


def _memfd(label: str, size: int) -> int:
    fd = os.memfd_create(f"holdfast-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _MEMFD_SEALS)
    except OSError as error:
        os.close(fd)
        raise NoSpace(f"cannot make {size} bytes of shared memory: {error.strerror}", hint=_MEMORY_HINT) from error
    return fd
