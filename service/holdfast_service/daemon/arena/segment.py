"""One rank's segment of shared memory: its slots, which are free, and the content of sealed ones."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable

from holdfast_formats.digest import digest
from holdfast_formats.errors import ArenaFull, CheckpointError, InvalidRequest, NoSpace, StateMismatch
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import Geometry, SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.room import amount, not_created
from holdfast_formats.staging.slot_pages import RecentNeed, have_pages, in_order
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.daemon.arena.peer import PeerProcess
from holdfast_service.daemon.arena.shares import ShareHolder
from holdfast_service.daemon.arena.spill import emptier
from holdfast_service.storage import scratch

log = logging.getLogger(__name__)

LEASE_DEADLINE_S = 600.0
GONE_POLL_S = 0.5  # nor does it call when a process ends that waits here
READ_POLL_S = 0.05  # the kernel sends no notification when a reader unlocks a slot
SPARE_FACTOR_MAX = 2  # a rank that needs less than half of a segment does not take it over
NO_MEMORY = "no-memory"  # why all slots that can be leased are taken: the others have no memory

MayGrow = Callable[[ShareHolder], bool]
ALWAYS: MayGrow = lambda holder: True  # noqa: E731 - a value


class ArenaSegment:
    """One rank's shared memory and its free slots. Owns the mapping and closes it after the last view. A spilled segment is
    a file on the storage's disk. `notice` explains to the rank how it was created.

    Memory for all slots is reserved, and taken slot by slot (`slot_pages`): `may_grow` says whether the memory that is
    reserved for a holder is still there.
    """

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        fd: int,
        geometry: Geometry,
        owner: SegmentOwner | None,
        name: str,
        *,
        spilled: bool = False,
        notice: str = "",
        may_grow: MayGrow = ALWAYS,
    ) -> None:
        self.fd, self.geometry, self.owner, self.name, self._may_grow = fd, geometry, owner, name, may_grow
        self.holder = ShareHolder(owner.run if owner is not None else "")  # whose share it counts for
        self.spilled, self.notice = spilled, notice
        self._empty: Callable[[int], None] = emptier(fd, geometry) if spilled else lambda slot: None
        self.user: object = None  # the conversation that uses it now
        self._peer: PeerProcess | None = None  # the process that last did
        try:
            self._map = mmap.mmap(fd, geometry.segment_bytes)
        except OSError as error:
            raise NoSpace(f"cannot map {geometry.segment_bytes} bytes: {error.strerror}", hint=_MEMORY_HINT) from error
        self.memory = memoryview(self._map)
        self._free = set(range(geometry.slots))
        self._quiet = set[int]()  # of the free ones: their rank has leased another slot since, and writes there
        self._need = RecentNeed()
        self._kept: dict[int, Callable[[], None]] = {}  # of the free ones; what to do when such a slot is leased after all
        self._when_idle: Callable[[], None] | None = None
        self.outgrown = False  # its rank has a larger one: what is still saved from it is not held
        self._changed = threading.Condition()

    @classmethod
    def make(
        cls,
        fd: int,
        geometry: Geometry,
        owner: SegmentOwner | None,
        spilled: bool = False,
        notice: str = "",
        may_grow: MayGrow = ALWAYS,
    ) -> ArenaSegment:
        """Create a segment in the memory of `fd`, with all slots free. The descriptor belongs to it, also if this raises."""
        try:
            segment = cls(fd, geometry, owner, uuid.uuid4().hex, spilled=spilled, notice=notice, may_grow=may_grow)
        except NoSpace:
            os.close(fd)
            raise
        arena.write_superblock(segment.memory, geometry, owner)
        for slot in range(geometry.slots):
            arena.write_header(segment.memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
        return segment

    @classmethod
    def adopt(cls, fd: int, name: str, on_disk: bool = True, may_grow: MayGrow = ALWAYS) -> ArenaSegment:
        """Take over a segment of another daemon: leased and sealed slots stay taken. `InvalidRequest` if it is not a
        segment, or a file where none is allowed (`on_disk`).

        The descriptor belongs to the segment only if this returns.
        """
        spilled = is_spilled(fd)
        if spilled and not on_disk:
            raise InvalidRequest("a file of another user, which that user could truncate")
        with mmap.mmap(fd, arena.PAGE_BYTES, prot=mmap.PROT_READ) as page, memoryview(page) as seen:
            geometry, owner = arena.read_measures(seen), arena.read_owner(seen)
        if geometry.segment_bytes > os.fstat(fd).st_size:
            raise InvalidRequest("a truncated staging arena")
        segment = cls(fd, geometry, owner, name, spilled=spilled, may_grow=may_grow)
        segment._free = {slot for slot in range(geometry.slots) if segment.state(slot) is SlotState.FREE}
        return segment

    def find_taken(self) -> list[int]:
        """The slots that the rank leased by itself without a daemon."""
        with self._changed:
            taken = [slot for slot in sorted(self._free) if self.state(slot) is not SlotState.FREE]
            self._free.difference_update(taken)
            when_leased = [self._kept.pop(slot) for slot in taken if slot in self._kept]
        for forget in when_leased:
            forget()
        return taken

    def is_at(self, fd: int) -> bool:
        """Whether a descriptor is of this memory."""
        return os.path.sameopenfile(self.fd, fd)

    def state(self, slot: int) -> SlotState:
        """The state in a slot's header; an invalid header is replaced by a free slot's."""
        try:
            return arena.read_header(self.memory, self.geometry, slot).state
        except InvalidRequest:
            arena.write_header(self.memory, self.geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
            return SlotState.FREE

    def disown(self, slot: int) -> None:
        """A rank declared a slot sealed that it does not own: mark it free, whatever its header says."""
        with self._changed:
            if slot in self._free:
                arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)

    def lease(self, step: int, attempt: int, wait_s: float, is_gone: Callable[[], bool] = lambda: False) -> int:
        """Lease a free slot for `step`; waits up to `wait_s` seconds, then `ArenaFull`. Slots with memory come first, and of
        these one with an in-memory checkpoint last. Stops waiting if the rank is gone.
        """
        header, limit = SlotHeader(SlotState.LEASED, step, attempt, 0, 0, 0), time.monotonic() + wait_s
        slot, grows, wants = None, False, False
        while slot is None:
            if wants:  # without the lock: the arena's comes first
                grows = self._may_grow(self.holder)
            with self._changed:
                slot = self._claim(header, grows)
                wants = slot is None and bool(self._free) and not (grows or wants)
                if slot is None and not wants:
                    left = limit - time.monotonic()
                    if left <= 0 or is_gone():
                        raise self._full(grows)
                    self._changed.wait(min(left, READ_POLL_S if self._free else GONE_POLL_S))
                elif slot is not None:
                    self._need.note(self.geometry.slots - len(self._free))
                    self._quiet = set(self._free)
                    when_leased = self._kept.pop(slot, None)
        if when_leased is not None:
            when_leased()
        return slot

    def foresee(self) -> int | None:
        """The slot that another save would take before those under way have ended, if there is one with memory or room for
        it. It counts as needed by the last save: its rank touches it ahead of need.
        """
        grows = self._may_grow(self.holder)
        with self._changed:
            slot = next(iter(self._in_order(grows)), None)
            if slot is not None:
                self._need.foresee(self.geometry.slots - len(self._free) + 1)
        return slot

    def _in_order(self, may_grow: bool) -> list[int]:
        return in_order(self._free, have_pages(self.fd, self.geometry), lambda slot: slot in self._kept, may_grow)

    def _claim(self, header: SlotHeader, may_grow: bool) -> int | None:
        """Take a slot that is free, and that no process is reading, and write its header."""
        for slot in self._in_order(may_grow):
            if _lock(self.fd, self.geometry, slot, fcntl.F_WRLCK):
                self._empty(slot)
                arena.write_header(self.memory, self.geometry, slot, header)
                _lock(self.fd, self.geometry, slot, fcntl.F_UNLCK)
                self._free.remove(slot)
                return slot
        return None

    def _full(self, grows: bool) -> ArenaFull:
        if self._free and not grows:
            return ArenaFull(
                f"there is no memory for another slot of {amount(self.geometry.slot_bytes)}, which was reserved: other "
                "programs, or the training, have taken it",
                hint="free memory, or raise the memory limit of the trainer's container, or save less often",
                reason=NO_MEMORY,
            )
        return ArenaFull(
            f"all {self.geometry.slots} slots hold saves that are not yet written",
            hint="save less often, or give the checkpointer more slots",
        )

    def give_back_spare(self) -> None:
        """Return the memory of slots that none of the last saves needed. Never that of an in-memory checkpoint, nor of a
        slot into which its rank may still write, as after a save that was given up.
        """
        if self.geometry.slots == 1:
            return
        with self._changed:
            with_pages = have_pages(self.fd, self.geometry)
            idle = with_pages & self._free & self._quiet - self._kept.keys()
            spare = self._need.surplus(with_pages, self.geometry.slots - len(self._free), idle)
            self._free.difference_update(spare)
        for slot in spare:
            try:
                self._empty_memory(slot)
            finally:
                self._add_free(slot)

    def _empty_memory(self, slot: int) -> None:
        """Return a slot's memory. The lock is another open file's than the one that this daemon shares with its rank and its
        successor: neither leases the slot before this has ended, even if this process is suspended meanwhile.
        """
        own = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if _lock(own, self.geometry, slot, fcntl.F_WRLCK) and self.state(slot) is SlotState.FREE:
                arena.mark_emptied(self.memory, self.geometry, slot)
                self._return_memory(slot)
        finally:
            os.close(own)

    def _return_memory(self, slot: int) -> None:
        scratch.give_back(self.fd, self.geometry.data_offset(slot), self.geometry.slot_bytes - arena.PAGE_BYTES)

    def keep(self, slot: int, when_leased: Callable[[], None]) -> None:
        """This slot's content may be needed again: lease it last, and do not retire before `unkeep`."""
        with self._changed:
            self._kept[slot] = when_leased

    def unkeep(self, slot: int) -> None:
        """This slot's content is no longer needed."""
        with self._changed:
            self._kept.pop(slot, None)
            idle = self._when_idle if self._idle else None
        if idle is not None:
            idle()

    @property
    def _idle(self) -> bool:
        return len(self._free) == self.geometry.slots and not self._kept

    def release(self, slot: int) -> None:
        """Give a slot back; safe to repeat."""
        arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)
        self._add_free(slot)

    def _add_free(self, slot: int) -> None:
        with self._changed:
            self._free.add(slot)
            self._changed.notify_all()
            idle = self._when_idle if self._idle else None
        if idle is not None:
            idle()

    @property
    def taken(self) -> list[int]:
        with self._changed:
            return [slot for slot in range(self.geometry.slots) if slot not in self._free]

    @property
    def uses(self) -> tuple[int, int, int]:
        """Number of slots that are free, are free with an in-memory checkpoint, and are taken."""
        with self._changed:
            held = len(self._free & self._kept.keys())
            return len(self._free) - held, held, self.geometry.slots - len(self._free)

    @property
    def touched_bytes(self) -> int:
        """Bytes that are in memory, or on the disk."""
        return min(os.fstat(self.fd).st_blocks * 512, self.geometry.segment_bytes)

    @property
    def retired(self) -> bool:
        return self._when_idle is not None

    def count_for(self, holder: ShareHolder) -> None:
        """Its memory counts for this holder's share."""
        self.holder = holder

    def revive(self) -> None:
        """The rank has returned: do not free the segment when it becomes idle."""
        with self._changed:
            self._when_idle = None

    def retire(self, when_idle: Callable[[], None], outgrown: bool = False) -> None:
        """Call `when_idle` once no slot is leased, sealed or kept: now, or at the last release. `outgrown`: its rank has a
        larger one.
        """
        self.outgrown = outgrown
        with self._changed:
            self._when_idle = when_idle
            idle = self._idle
        if idle:
            when_idle()

    def used_by(self, user: object, peer: PeerProcess) -> None:
        """Record the connection that uses the segment, and its process."""
        if self._peer is not None:
            self._peer.close()
        self.user, self._peer = user, peer

    def pass_on(self, owner: SegmentOwner, geometry: Geometry) -> bool:
        """Hand the segment to `owner`, if it was the same rank's in an earlier attempt, is large enough, and its process is
        gone.
        """
        mine = self.owner
        if mine is None or self.spilled or (mine.run, mine.rank, mine.world) != (owner.run, owner.rank, owner.world):
            return False
        with self._changed:
            fits = all(have >= need for have, need in zip(self.geometry, geometry, strict=True))
            fits = fits and self.geometry.segment_bytes <= SPARE_FACTOR_MAX * geometry.segment_bytes
            left = mine.attempt < owner.attempt and len(self._free) == self.geometry.slots and self._when_idle is not None
            if not fits or not left or self._peer is None or not self._peer.gone:
                return False
            arena.write_superblock(self.memory, self.geometry, owner)
            self.owner, self._when_idle = owner, None
            return True

    def take_sealed(self, slot: int, step: int, table_digest: str) -> SealedSlot:
        """The content of a sealed slot, verified by its header, seal and table digest; `InvalidRequest` if it is not
        valid.
        """
        if not 0 <= slot < self.geometry.slots:
            raise InvalidRequest(f"there is no slot {slot}")
        header = arena.read_header(self.memory, self.geometry, slot)
        if header.state is not SlotState.SEALED or header.step != step:
            raise InvalidRequest(f"slot {slot} is {header.state.name.lower()} for step {header.step}, not sealed for {step}")
        start = self.geometry.table_offset(slot)
        encoded = bytes(self.memory[start : start + header.table_bytes])
        if digest(encoded) != table_digest or int(table_digest, 16) != header.seal:
            raise InvalidRequest(f"slot {slot}: the table does not match its digest")
        data_start = self.geometry.data_offset(slot)
        data = self.memory[data_start : data_start + header.data_bytes]
        return SealedSlot(self, slot, slot_table.decode(encoded, header.data_bytes), data)

    def give_back(self) -> None:
        """Empty all slots, so that memory is free although others map it. Superblock and headers stay."""
        if self.spilled:
            return  # its blocks stay reserved: a late write into it must not want for one
        for slot in range(self.geometry.slots):
            if _lock(self.fd, self.geometry, slot, fcntl.F_WRLCK):  # never to be read again; a slot that is read stays
                self._return_memory(slot)

    def close(self) -> None:
        """Return the memory to the system, once the last view of it is gone."""
        self.user = self._when_idle = None  # a reference cycle would keep the memory until a garbage collection
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        with self._changed:  # what looks for pages has the lock, and must not look into another file of this number
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SealedSlot:
    """A complete slot: its decoded table and its data. Its bytes are read-only until it is released, but for an average."""

    def __init__(self, segment: ArenaSegment, slot: int, slot_table: SlotTable, data: memoryview) -> None:
        self.segment, self.slot = segment, slot
        self.table = slot_table
        self.data = data

    def describe(self, slot_table: SlotTable) -> None:
        """The table that is saved: with the average that was put into the slot, or without its group."""
        self.table = slot_table

    def release(self) -> None:
        self.segment.release(self.slot)


def check_identity(sealed: SealedSlot, owner: SegmentOwner, step: int) -> None:
    """`StateMismatch` if a slot's table belongs to another rank or save than the one that sealed it."""
    if (sealed.table.owner, sealed.table.step) != (owner, step):
        stated = f"{sealed.table.owner} at step {sealed.table.step}"
        raise StateMismatch(f"the slot's table names {stated}, but was sealed by {owner} at step {step}")


def same_user(sealed: Iterable[SealedSlot]) -> bool:
    """Whether these slots belong to ranks of one user."""
    return len({one.segment.holder.tenant for one in sealed}) == 1


def find_sealed(segment: ArenaSegment, slot: int) -> SealedSlot | None:
    """The content of a slot if it is sealed, complete and its owner's; otherwise None."""
    try:
        header = arena.read_header(segment.memory, segment.geometry, slot)
        sealed = segment.take_sealed(slot, header.step, f"{header.seal:016x}")
        if segment.owner is not None:
            check_identity(sealed, segment.owner, header.step)
    except CheckpointError as error:
        log.debug("slot %d of %s was not sealed: %s", slot, segment.owner, error.detail)
        return None
    return sealed


def _lock(fd: int, geometry: Geometry, slot: int, kind: int) -> bool:
    """Lock or unlock a slot against readers; False while one reads it. Without file locks there are no readers."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, arena.slot_lock(geometry, slot, kind))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        log.debug("cannot lock slots: %s", error)
    return True


_MEMORY_HINT = "free memory on this machine, or save a smaller state with fewer slots"


_MEMFD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a rank cannot pull the memory away from under the daemon


def is_spilled(fd: int) -> bool:
    """Whether a segment is a file on disk, or memory of a fixed size; `InvalidRequest` for anything else.

    Files have no seals: they are mapped only if only the daemon's own user and root have had the descriptor
    (`Arena.reserve`, `Arena.attach`). Sealed memory in large pages is refused: touching a missing page kills the process.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _MEMFD_SEALS == _MEMFD_SEALS
        fixed = sealed and scratch.is_in_memory(fd)
        spilled = False
    except OSError:
        fixed = spilled = scratch.is_scratch(fd)
    if not fixed:
        raise InvalidRequest("shared memory whose size can change is not a staging arena")
    return spilled


def memfd(label: str, size: int) -> int:
    """Create shared memory of a fixed size; `NoSpace` if memory or descriptors run out, `StorageFailed` if this process may
    not create it, or none of this size.
    """
    fd = -1
    try:
        fd = os.memfd_create(f"holdfast-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _MEMFD_SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise not_created(size, error, "the daemon") from error
    return fd
