"""Leases a slot without a daemon, so that training does not wait for the next one, which finds the lease in the segment."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os

from holdfast_formats import memory_bounds
from holdfast_formats.errors import CheckpointError, GenerationDropped
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import Geometry, SlotHeader, SlotState
from holdfast_formats.staging.slot_pages import have_pages, in_order

log = logging.getLogger(__name__)


def take_slot(fd: int, step: int, attempt: int) -> int | None:
    """Lease a slot of the segment for the step; None if all are in use.

    Prefers the slot that the last daemon had leased for this step without answering. Then free slots: those with memory,
    then others if there is memory for them; oldest step first, because one may contain the in-memory checkpoint.
    """
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as mapped, memoryview(mapped) as memory:
            geometry = arena.read_superblock(memory)
            headers = [(arena.read_header(memory, geometry, slot), slot) for slot in range(geometry.slots)]
            for header, slot in headers:
                if (header.state, header.step, header.attempt) == (SlotState.LEASED, step, attempt):
                    return slot
            steps = {slot: header.step for header, slot in headers if header.state is SlotState.FREE}
            with_pages = have_pages(fd, geometry)
            may_grow = bool(steps.keys() & with_pages) or memory_bounds.can_touch(geometry.slot_bytes)
            free = in_order(steps, with_pages, steps.__getitem__, may_grow)
            return next((slot for slot in free if _lease(fd, memory, geometry, slot, (step, attempt))), None)
    except (CheckpointError, OSError, ValueError) as error:
        log.info("cannot take a slot without a daemon: %s", error)
        return None


def dropped(step: int, policy: str) -> GenerationDropped:
    return GenerationDropped(
        f"the save of step {step} was dropped (policy {policy}): the daemon is gone, and all slots hold "
        "earlier saves that wait for the next daemon",
        hint="restart the daemon, or give the checkpointer more slots",
        policy=policy,
    )


def _lease(fd: int, memory: memoryview, geometry: Geometry, slot: int, who: tuple[int, int]) -> bool:
    """Write a lease into a slot's header, as the daemon does, unless another process has locked the slot to read it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, arena.slot_lock(geometry, slot, fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    try:
        arena.write_header(memory, geometry, slot, SlotHeader(SlotState.LEASED, *who, 0, 0, 0))
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, arena.slot_lock(geometry, slot, fcntl.F_UNLCK))
    return True
