"""A slot that a rank takes for itself while no daemon is there to lease it one: training does not wait for the next daemon.

The next one finds in the segment what was taken, as it finds what the last one had leased.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os

from holdfast_formats.errors import CheckpointError, GenerationDropped
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import Geometry, SlotHeader, SlotState

log = logging.getLogger(__name__)


def take_slot(fd: int, step: int, attempt: int) -> int | None:
    """A slot of the segment at this descriptor, leased for the step; None where there is none that nobody needs.

    One that the last daemon had leased for this very step, and did not live to say so, comes first. Of those that are free
    the one with the oldest step does: what a free slot holds may be wanted for a restore.
    """
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as mapped, memoryview(mapped) as memory:
            geometry = arena.read_superblock(memory)
            headers = [(arena.read_header(memory, geometry, slot), slot) for slot in range(geometry.slots)]
            for header, slot in headers:
                if (header.state, header.step, header.attempt) == (SlotState.LEASED, step, attempt):
                    return slot
            free = [(header.step, slot) for header, slot in headers if header.state is SlotState.FREE]
            return next((slot for _, slot in sorted(free) if _lease(fd, memory, geometry, slot, (step, attempt))), None)
    except (CheckpointError, OSError, ValueError) as error:
        log.info("no slot is taken without a daemon: %s", error)
        return None


def dropped(step: int, policy: str) -> GenerationDropped:
    """Why a save has no slot: all are taken, and the policy is not to wait."""
    return GenerationDropped(
        f"step {step} gave way to those before it ({policy}): the daemon is gone, and they wait for the next one",
        hint="have the daemon started anew, or give the checkpointer more slots",
        policy=policy,
    )


def _lease(fd: int, memory: memoryview, geometry: Geometry, slot: int, who: tuple[int, int]) -> bool:
    """Write a lease into a slot's header, as the daemon does, unless somebody reads the slot."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, arena.slot_lock(geometry, slot, fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    try:
        arena.write_header(memory, geometry, slot, SlotHeader(SlotState.LEASED, *who, 0, 0, 0))
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, arena.slot_lock(geometry, slot, fcntl.F_UNLCK))
    return True
