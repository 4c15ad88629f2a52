"""The node's shared memory. The daemon makes it, hands it to ranks as a memfd, and keeps it when they die."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

from holdfast_formats import arena, table
from holdfast_formats.arena import Geometry, SlotHeader, SlotState
from holdfast_formats.digest import digest
from holdfast_formats.errors import ArenaFull, InvalidRequest, LimitExceeded, NoSpace
from holdfast_formats.table import SlotTable

LEASE_DEADLINE_S = 600.0


class Segment:
    """One rank's shared memory: its slots, and which of them are free. Owns the mapping; closes it when nobody looks."""

    def __init__(self, geometry: Geometry, label: str) -> None:
        self.geometry = geometry
        self.fd = _memfd(label, geometry.segment_bytes)
        try:
            self._map = mmap.mmap(self.fd, geometry.segment_bytes)
        except OSError as error:
            os.close(self.fd)
            raise NoSpace(f"cannot map {geometry.segment_bytes} bytes: {error.strerror}", hint=_MEMORY_HINT) from error
        self.memory = memoryview(self._map)
        self._free = set(range(geometry.slots))
        self._when_idle: Callable[[], None] | None = None
        self._changed = threading.Condition()
        arena.write_superblock(self.memory, geometry)
        for slot in self._free:
            arena.write_header(self.memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))

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

    def close(self) -> None:
        """Give the memory back to the machine, once the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SealedSlot:
    """A complete slot: its decoded table and its data. Read-only by agreement until it is released."""

    def __init__(self, segment: Segment, slot: int, slot_table: SlotTable, data: memoryview) -> None:
        self.table = slot_table
        self.data = data
        self._release: Callable[[], None] = lambda: segment.release(slot)

    def release(self) -> None:
        self._release()


class Arena:
    """All segments of a node, and the limit on their sum."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._segments: set[Segment] = set()

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(segment.geometry.segment_bytes for segment in self._segments)

    def reserve(self, geometry: Geometry, label: str) -> Segment:
        """A new segment; `LimitExceeded`, with the numbers, when it does not fit the node's budget."""
        with self._lock:
            used = sum(segment.geometry.segment_bytes for segment in self._segments)
            if used + geometry.segment_bytes > self._bytes_max:
                raise LimitExceeded(
                    f"{label} needs {geometry.segment_bytes} bytes of shared memory ({geometry.slots} slots of "
                    f"{geometry.slot_bytes}); {used} of {self._bytes_max} are taken",
                    hint="start the daemon with a larger --arena-bytes-max, or use fewer slots",
                )
            segment = Segment(geometry, label)
            self._segments.add(segment)
            return segment

    def drop(self, segment: Segment) -> None:
        """The segment's rank is gone: give its memory back once what it sealed is saved."""
        segment.retire(lambda: self._remove(segment))

    def _remove(self, segment: Segment) -> None:
        with self._lock:
            self._segments.discard(segment)
        segment.close()


_MEMORY_HINT = "free memory on this machine, or save a smaller state with fewer slots"


def _memfd(label: str, size: int) -> int:
    fd = os.memfd_create(f"holdfast-{label}"[:200], os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise NoSpace(f"cannot make {size} bytes of shared memory: {error.strerror}", hint=_MEMORY_HINT) from error
    return fd
