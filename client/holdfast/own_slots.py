"""Slots in this rank's own memory, for a rank that shares none with its daemon."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

from holdfast_formats import arena, rest
from holdfast_formats.arena import Geometry, SlotHeader, SlotState
from holdfast_formats.errors import ArenaFull, CheckpointError, NoSpace


class OwnSegment:
    """Memory laid out as the daemon lays out an arena, so that staging does not know the difference."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.fd = os.memfd_create("holdfast-own", os.MFD_CLOEXEC)  # whoever takes it closes it
        try:
            os.ftruncate(self.fd, geometry.segment_bytes)
            self.memory = memoryview(mmap.mmap(self.fd, geometry.segment_bytes))
        except OSError as error:
            os.close(self.fd)
            hint = "free memory on this machine, or save a smaller state with fewer slots"
            raise NoSpace(f"cannot have {geometry.segment_bytes} bytes for slots: {error.strerror}", hint=hint) from error
        self._changed = threading.Condition()
        self._free = set(range(geometry.slots))
        self._lost: CheckpointError | None = None
        arena.write_superblock(self.memory, geometry)
        for slot in self._free:
            arena.write_header(self.memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))

    def lease(self, step: int, attempt: int, wait_s: float) -> int:
        """A free slot; waits up to `wait_s` seconds for one, then `ArenaFull`."""
        with self._changed:
            free = self._changed.wait_for(lambda: self._free or self._lost, wait_s)
            if self._lost is not None:
                raise self._lost
            if not free:
                raise ArenaFull(
                    f"all {self.geometry.slots} slots hold saves that have not been uploaded and written yet",
                    hint="save less often, have a faster link to the daemon, or give the checkpointer more slots",
                )
            slot = min(self._free)
            self._free.remove(slot)
        arena.write_header(self.memory, self.geometry, slot, SlotHeader(SlotState.LEASED, step, attempt, 0, 0, 0))
        return slot

    def release(self, slot: int) -> None:
        arena.set_state(self.memory, self.geometry, slot, SlotState.FREE)
        with self._changed:
            self._free.add(slot)
            self._changed.notify_all()

    def lose(self, error: CheckpointError) -> None:
        """No slot will become free any more: whoever waits for one is told why."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()


class OwnSave:
    """One save in a slot of ours, until its end is known (`told`) and nobody fills the slot any more (not `staging`)."""

    def __init__(self, number: int, step: int, segment: OwnSegment, slot: int) -> None:
        self.number, self.step, self.segment, self.slot = number, step, segment, slot
        self.staging = True
        self.delivered = False  # a daemon has all of it
        self.told = False
        self.problem: dict[str, Any] | None = None
        self.whole: rest.SealRequest | None = None

    def seal(self, table_digest: str) -> None:
        """The slot is complete: what it holds stands in its header from now on."""
        header = arena.read_header(self.segment.memory, self.segment.geometry, self.slot)
        self.whole = rest.SealRequest(
            data_bytes=header.data_bytes, table_bytes=header.table_bytes, table_digest=table_digest
        )

    def contents(self) -> tuple[memoryview, memoryview]:
        """The data and the table of a sealed slot."""
        assert self.whole is not None, "only what is sealed has contents"
        memory, geometry = self.segment.memory, self.segment.geometry
        data, table = geometry.data_offset(self.slot), geometry.table_offset(self.slot)
        return memory[data : data + self.whole.data_bytes], memory[table : table + self.whole.table_bytes]
