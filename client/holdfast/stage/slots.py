"""This rank's part of the node's arena: maps it, leases slots, seals them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from holdfast.memory.mapping import Mapping
from holdfast.threads.latch import Latch
from holdfast.transport import Transport
from holdfast_formats import memory_bounds
from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError, DaemonGone, LimitExceeded
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging import arena, messages, wire
from holdfast_formats.staging.arena import SlotHeader, SlotState, page_aligned
from holdfast_formats.staging.slot_pages import have_pages

WHILE_CONNECTED_S = 86_400.0  # no save waits that long; an answer counts whenever it comes


class Slot:
    """A leased slot: `data` is shared memory to fill; `seal` or `abandon` ends the lease."""

    def __init__(self, slots: Slots, index: int, step: int, attempt: int, turn: int) -> None:
        self.slots, self.index = slots, index
        self._step, self._attempt, self._turn = step, attempt, turn
        self.data = slots.data(index)

    def trim(self, data_bytes: int) -> None:
        """Return memory that saves no longer need; never that of the first `data_bytes`, which are filled."""
        self.slots.trim(self.index, data_bytes)

    def seal(self, table: bytes, data_bytes: int) -> str:
        """Mark the slot complete in shared memory, for any daemon that reads it. Returns its table's digest, for
        `hand_over`.
        """
        geometry, memory = self.slots.geometry, self.slots.memory
        if len(table) > geometry.table_bytes_max:
            raise LimitExceeded(f"a table of {len(table)} bytes does not fit the slot's {geometry.table_bytes_max}")
        start = geometry.table_offset(self.index)
        memory[start : start + len(table)] = table
        proof = digest(table)
        header = SlotHeader(SlotState.LEASED, self._step, self._attempt, data_bytes, len(table), 0)
        arena.seal(memory, geometry, self.index, header, proof)
        return proof

    def hand_over(self, proof: str) -> None:
        """Report the seal to the daemon. When this returns, the daemon saves the slot even if this process dies."""
        link = self.slots.link
        seal = wire.Seal(id=link.next_id(), slot=self.index, step=self._step, turn=self._turn, table_digest=proof)
        link.request(seal, wire.Sealed, WHILE_CONNECTED_S)

    def measured(self, stall_s: float) -> None:
        """Send how long training stalled for this save, without waiting for a reply."""
        link = self.slots.link
        link.notify(wire.Measured(id=link.next_id(), step=self._step, stall_s=stall_s))

    def abandon(self, error: CheckpointError) -> None:
        """Return the lease unsealed, so that the other ranks learn at once that this step is not saved."""
        link = self.slots.link
        message = wire.Abandon(id=link.next_id(), slot=self.index, step=self._step, problem=error.problem())
        link.request(message, wire.Done, WHILE_CONNECTED_S)


class AverageRoom(NamedTuple):
    """Bytes that the daemon leaves for the average of each of so many ranks on this machine."""

    bytes: int
    ranks: int


NO_AVERAGE = AverageRoom(0, 1)


class Pin(NamedTuple):
    """A page-locked slot: `emptied` of the time when it was locked, and what unlocks it."""

    emptied: int
    unlock: Callable[[], object]


class Slots:
    """The segment that the daemon made for this rank. If it is smaller than requested, `notice` says why."""

    def __init__(
        self, link: Transport, count: int, data_bytes: int, table_bytes: int, averages: AverageRoom = NO_AVERAGE
    ) -> None:
        self.link = link
        message = wire.Reserve(
            id=link.next_id(),
            slots=count,
            data_bytes=data_bytes,
            table_bytes=table_bytes,
            bounds=tuple(memory_bounds.of_process()),
            average_bytes=averages.bytes,
            averages=averages.ranks,
        )
        with link.receiving:
            given = link.request(message, wire.Segment, WHILE_CONNECTED_S)
            fd = link.take_fd()
        self.notice, self.spilled = given.notice, given.spilled
        self._touching = threading.Lock()
        self._touched: dict[int, tuple[int, int]] = {}  # slots whose pages are mapped: `emptied` and `used_bytes` then
        self._trimmed: dict[int, tuple[int, int]] = {}  # the same of slots whose end has no memory
        self.pinning = threading.Lock()
        self.pins: dict[int, Pin] = {}  # slots that are page-locked for GPUs (`cuda_copy`)
        self.may_pin = not self.spilled  # pages of a file cannot be locked for long
        try:
            self._mapping = Mapping(fd, write=True)
            self.memory = self._mapping.memory
            self.geometry = arena.read_superblock(self.memory)
            self.used_bytes = self.geometry.data_bytes  # of each slot's room for data, as far as saves use it
            self.first = sorted(have_pages(fd, self.geometry)) or [0]  # the slots that are leased first
        except OSError as error:
            raise DaemonGone(f"cannot map the daemon's shared memory: {error}") from error
        finally:
            os.close(fd)

    def touch(self, slot: int, stop: Latch) -> None:
        """Map every page of a slot, so that the next save is as fast as later ones; ends early when `stop` is set."""
        with self._touching:  # a second thread waits here and finds it done
            if not self.is_ready(slot):
                now, geometry = (self.emptied(slot), self.used_bytes), self.geometry
                begin, end = geometry.header_offset(slot) if slot else 0, geometry.data_offset(slot) + now[1]
                table = geometry.table_offset(slot)
                if self._mapping.touch(begin, page_aligned(end), stop.is_set) and self._mapping.touch(
                    table, table + geometry.table_bytes_max, stop.is_set
                ):
                    self._touched[slot] = now

    def is_ready(self, slot: int) -> bool:
        """Whether its pages are mapped, as far as that helps: touching a spilled segment would write it to the disk."""
        emptied, used_bytes = self._touched.get(slot, (-1, 0))
        return self.spilled or (emptied == self.emptied(slot) and used_bytes >= self.used_bytes)

    @property
    def slot_bytes(self) -> int:
        """The room of each slot, as far as saves use it."""
        return self.geometry.slot_bytes - self.geometry.data_bytes + self.used_bytes

    def use(self, data_bytes: int) -> None:
        """Saves use no more of each slot from now on. What is beyond stays reserved."""
        self.used_bytes = min(data_bytes, self.geometry.data_bytes)

    def trim(self, slot: int, filled_bytes: int) -> None:
        """Return the memory of this rank's slot, which it is filling, beyond what saves use and what is filled."""
        now = self.emptied(slot), max(self.used_bytes, filled_bytes)
        begin, end = self.geometry.data_offset(slot) + page_aligned(now[1]), self.geometry.table_offset(slot)
        if begin >= end or self._trimmed.get(slot) == now or self.spilled or slot in self.pins:
            return
        if self._touching.acquire(blocking=False):  # else a later save does it
            try:
                self._mapping.give_back(begin, end)
                self._trimmed[slot] = now
            finally:
                self._touching.release()

    def emptied(self, slot: int) -> int:
        """How often the daemon has returned the memory of this slot to the system."""
        return arena.emptied(self.memory, self.geometry, slot)

    def data(self, index: int) -> memoryview:
        """The memory of a slot for tensors."""
        start = self.geometry.data_offset(index)
        return self.memory[start : start + self.geometry.data_bytes]

    def fits(self, data_bytes: int, table_bytes: int) -> bool:
        return data_bytes <= self.used_bytes and table_bytes <= self.geometry.table_bytes_max

    def foresee(self) -> int | None:
        """The slot that another save would take before those under way are written. From now on it counts as needed, and
        there is memory for it; None if there is no such slot.
        """
        message = wire.Foresee(id=self.link.next_id(), bounds=tuple(memory_bounds.of_process()))
        return self.link.request(message, wire.Foreseen, WHILE_CONNECTED_S).slot

    def lease(
        self,
        step: int,
        attempt: int,
        wait_s: float,
        policy: messages.Policy = "wait",
        intent: Intent = NO_INTENT,
        unwritten: int = 0,
    ) -> Slot:
        """Lease a slot for this rank's part of `step`; if none is free, the policy decides, see `SlotRequest`. So many
        earlier saves are `unwritten`: another slot may need memory.
        """
        ready = sum(map(self.is_ready, range(self.geometry.slots)))
        grows = max(ready, 1) <= unwritten and ready < self.geometry.slots
        bounds = tuple(memory_bounds.of_process()) if grows else ()
        number, said = self.link.next_id(), intent._asdict()
        message = wire.Lease(id=number, step=step, wait_s=wait_s, policy=policy, bounds=bounds, **said)
        granted = self.link.request(message, wire.Granted, wait_s + WHILE_CONNECTED_S)
        return Slot(self, granted.slot, step, attempt, intent.turn)
