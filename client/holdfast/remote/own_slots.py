"""Slots in a rank's own memory, if it shares none with its daemon."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.threads import at_exit
from holdfast_formats import memory_bounds
from holdfast_formats.errors import ArenaFull, CheckpointError, LimitExceeded, StateMismatch
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.rest import bodies
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import Geometry, SlotHeader, SlotState
from holdfast_formats.staging.messages import SlotRequest
from holdfast_formats.staging.room import SegmentRoom, fewer_notice, fitting, not_created
from holdfast_formats.staging.slot_pages import RecentNeed, in_order

JOIN_POLL_S = 0.02


def within(asked: Geometry, bounds: Sequence[Bound]) -> tuple[Geometry, str]:
    """As many slots as this process's memory limits allow, and a notice if they are fewer; `LimitExceeded` if not one
    fits.
    """
    rooms = [SegmentRoom(of.usable, f"{of.name}, {of.bytes_max} bytes") for of in bounds]
    room = min(rooms, default=SegmentRoom(asked.segment_bytes, ""))
    slots = fitting(asked, room)
    if slots == asked.slots:
        return asked, ""
    room = room._replace(bytes=max(room.bytes, 0))
    if not slots:
        one = asked._replace(slots=1).segment_bytes
        raise LimitExceeded(
            f"one slot needs {one} bytes of this process's memory, but only {room.bytes} are left of {room.name}",
            hint="raise the memory limit of the trainer's container or control group, or save a smaller state",
            needed=one,
            left=room.bytes,
        )
    return asked._replace(slots=slots), fewer_notice(asked, slots, room)


class OwnSegment:
    """Memory laid out as the daemon's arena, so that staging needs no special case."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.fd = -1  # closed by its new owner
        try:
            self.fd = os.memfd_create("holdfast-own", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, geometry.segment_bytes)
            self._map = mmap.mmap(self.fd, geometry.segment_bytes)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise not_created(geometry.segment_bytes, error, "this process") from error
        self.memory = memoryview(self._map)
        self._changed = threading.Condition()
        self._free = set(range(geometry.slots))
        self._used, self._need = set[int](), RecentNeed()  # slots that have memory
        self._lost: CheckpointError | None = None
        arena.write_superblock(self.memory, geometry)
        for slot in self._free:
            arena.write_header(self.memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))

    def lease(self, step: int, attempt: int, wait_s: float) -> int:
        """Lease a free slot; waits up to `wait_s` seconds for one, then raises `ArenaFull`."""
        with self._changed:
            self._changed.wait_for(lambda: self._next() or self._lost, wait_s)
            if self._lost is not None:
                raise self._lost
            free = self._next()
            if not free:
                raise ArenaFull(
                    f"all {self.geometry.slots} slots are occupied by saves that are not yet uploaded and written"
                    + (", and there is no memory for another one" if self._free else ""),
                    hint="save less often, use a faster link to the daemon, or give the checkpointer more slots",
                )
            slot = free[0]
            self._free.remove(slot)
            self._used.add(slot)
            self._need.note(self.geometry.slots - len(self._free))
        arena.write_header(self.memory, self.geometry, slot, SlotHeader(SlotState.LEASED, step, attempt, 0, 0, 0))
        return slot

    def foresee(self) -> int | None:
        """The slot that another save would take before those under way have ended, if there is one with memory or room for
        it. It counts as needed by the last save.
        """
        with self._changed:
            slot = next(iter(self._next()), None)
            if slot is not None:
                self._used.add(slot)
                self._need.foresee(self.geometry.slots - len(self._free) + 1)
        return slot

    def release(self, slot: int) -> None:
        """Give back a slot into which nothing is written any more."""
        arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)
        with self._changed:
            self._free.add(slot)
            for spare in self._need.surplus(self._used, self.geometry.slots - len(self._free), self._used & self._free):
                arena.mark_emptied(self.memory, self.geometry, spare)
                size = self.geometry.slot_bytes - arena.PAGE_BYTES
                self._map.madvise(mmap.MADV_REMOVE, self.geometry.data_offset(spare), size)
                self._used.remove(spare)
            self._changed.notify_all()

    def _next(self) -> list[int]:
        """The free slots in the order in which they are leased, as far as there is memory for them."""
        may_grow = bool(self._free & self._used) or memory_bounds.can_touch(self.geometry.slot_bytes)
        return in_order(self._free, self._used, lambda slot: 0, may_grow)

    def give_back(self) -> None:
        """A larger segment follows: free this one as soon as no save uses it."""
        with self._changed:
            if len(self._free) == self.geometry.slots:
                self._map.madvise(mmap.MADV_REMOVE)

    def lose(self, error: CheckpointError) -> None:
        """No slot will become free any more: pass the reason to all waiting threads."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()


class OwnSave:
    """A save in an own slot, until its outcome is known (`reported`) and its slot is filled (not `staging`)."""

    def __init__(self, run: str, number: int, wanted: SlotRequest, segment: OwnSegment, slot: int) -> None:
        self.run, self.number, self.wanted, self.segment, self.slot = run, number, wanted, segment, slot
        self.staging = True
        self.open = False  # the present daemon has begun it
        self.begun = False  # its upload, which nothing here takes back any more
        self.delivered = False  # a daemon has all of it
        self.arrived = 0  # bytes at the daemon
        self.reported = False
        self.problem: dict[str, Any] | None = None
        self.whole: bodies.SealRequest | None = None
        self.stall_s: float | None = None

    @property
    def step(self) -> int:
        return self.wanted.step

    def seal(self, table_digest: str) -> None:
        """Mark the slot complete: its header now states its contents."""
        header = arena.read_header(self.segment.memory, self.segment.geometry, self.slot)
        self.whole = bodies.SealRequest(
            data_bytes=header.data_bytes, table_bytes=header.table_bytes, table_digest=table_digest
        )

    def join(self, timeout: float | None = None) -> bool:
        """Wait until a daemon has all of it or its outcome is known; False if no byte of it arrived for `timeout`
        seconds.
        """
        arrived, moved = self.arrived, time.monotonic()
        while not (self.delivered or self.reported):
            if self.arrived != arrived:
                arrived, moved = self.arrived, time.monotonic()
            if timeout is not None and time.monotonic() > moved + timeout:
                return False
            time.sleep(JOIN_POLL_S)
        return True

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"

    def contents(self) -> tuple[memoryview, memoryview]:
        assert self.whole is not None, "only sealed slots have contents"
        memory, geometry = self.segment.memory, self.segment.geometry
        data, table = geometry.data_offset(self.slot), geometry.table_offset(self.slot)
        return memory[data : data + self.whole.data_bytes], memory[table : table + self.whole.table_bytes]


class OwnSaves:
    """Saves by step whose outcome is unknown or whose slot is still being filled, in the order in which they began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, OwnSave] = {}

    def add(self, save: OwnSave) -> None:
        """Add a save; `StateMismatch` while another save of the step is under way."""
        with self._lock:
            if self._saves.setdefault(save.step, save) is not save:
                raise StateMismatch(f"step {save.step} is already being saved", hint="wait for its ticket first")

    def find(self, step: int) -> OwnSave | None:
        return self._saves.get(step)  # in one bytecode: called by the training thread, which signals interrupt

    @property
    def all_open(self) -> bool:
        with self._lock:
            return all(save.open or save.reported for save in self._saves.values())

    def oldest(self) -> OwnSave | None:
        with self._lock:
            return next((save for save in self._saves.values() if not save.reported), None)

    def forget(self, save: OwnSave) -> bool:
        """Remove a save; False if it was unknown."""
        with self._lock:
            known = self._saves.get(save.step) is save
            if known:
                del self._saves[save.step]
        at_exit.forget(save)
        return known

    def free(self, save: OwnSave) -> None:
        if self.forget(save):
            save.segment.release(save.slot)

    def staged(self, save: OwnSave) -> bool:
        """Mark its slot as filled; return whether its outcome is known. If not, keep the process alive for the upload."""
        with self._lock:
            save.staging = False
            if not save.reported:
                at_exit.see_through(save)
            return save.reported

    def end(self, save: OwnSave, problem: dict[str, Any] | None) -> bool:
        """Record its outcome, and free its slot unless it is still being filled; False if the outcome was known."""
        with self._lock:
            if save.reported:
                return False
            save.reported, save.problem = True, problem
            staging = save.staging
        at_exit.forget(save)
        if not staging:
            self.free(save)
        return True

    def begin_upload(self, save: OwnSave) -> bool:
        """Mark its upload as begun, so that the save cannot be dropped. False if it has ended already."""
        with self._lock:
            save.begun = save.begun or not save.reported
            return not save.reported

    def take_back(self, problem: Callable[[OwnSave], dict[str, Any]]) -> OwnSave | None:
        """End the oldest sealed save whose upload has not begun, and free its slot; None if there is none."""
        with self._lock:
            waiting = (save for save in self._saves.values() if not (save.staging or save.begun or save.reported))
            save = next(waiting, None)
            if save is None:
                return None
            save.reported, save.problem = True, problem(save)
        self.free(save)
        return save

    def delivered(self, save: OwnSave, still: Callable[[], bool]) -> bool:
        """Record that a daemon has all of it, if that is `still` the current daemon."""
        with self._lock:
            save.delivered = still()
            if save.delivered:
                at_exit.forget(save)
            return save.delivered

    def bring_again(self) -> list[OwnSave]:
        """Saves that the last daemon had completely and its successor does not know."""
        with self._lock:
            for save in self._saves.values():
                save.open = False
            again = [save for save in self._saves.values() if save.delivered and not save.reported]
            for save in again:
                save.delivered = False
                at_exit.see_through(save)
            return again

    def lose(self) -> None:
        with self._lock:
            for save in self._saves.values():
                save.reported = True
                at_exit.forget(save)
