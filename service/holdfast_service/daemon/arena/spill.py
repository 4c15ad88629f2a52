"""Staging on the storage's disk, for a rank whose state does not fit memory, and messages for such a rank.

The segment is an unnamed file that is mapped like memory. The kernel's page cache is the buffer: staging runs at
memory speed as long as memory lasts, and at disk speed beyond.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError, LimitExceeded, NoSpace
from holdfast_formats.staging.arena import Geometry
from holdfast_formats.staging.room import MIB, SegmentRoom, amount
from holdfast_service.daemon.arena.shares import StagingQuota
from holdfast_service.storage import scratch

NO_FILE = (
    "; it is not staged on disk, because a process that has the file can truncate it: only ranks of the daemon's "
    "own user, and ranks that save over HTTP (at=URL, with a token), are staged there"
)


class Spilled(NamedTuple):
    """A reserved segment file, and the notice for its rank."""

    fd: int
    geometry: Geometry
    notice: str


class Spill:
    """Creates segments on the disk of the storage root. `quotas` limit what a run stages there."""

    def __init__(self, root: Path, quotas: Callable[[str], Sequence[StagingQuota]] = lambda run: ()) -> None:
        self._root, self.quotas = root, quotas

    def free_bytes(self) -> int:
        return scratch.free_bytes(self._root)

    def make(self, asked: Geometry, room: SegmentRoom, disk: SegmentRoom) -> Spilled:
        """Reserve one slot on the disk; `NoSpace` or `StorageFailed`, with the numbers, if the disk has no room either.
        `disk` is how much of it this holder may use.
        """
        one = asked._replace(slots=1)
        if disk.bytes < one.segment_bytes <= self.free_bytes():
            raise NoSpace(f"it needs {one.segment_bytes} bytes there, but {disk.bytes} are left ({disk.name})")
        fd = scratch.open_scratch(self._root, one.segment_bytes, one.data_bytes)
        try:
            speed = scratch.write_speed(fd, one.segment_bytes)
        except CheckpointError:
            os.close(fd)
            raise
        short = amount(one.segment_bytes - room.bytes)
        has = f"room for {amount(room.bytes)} more" if room.bytes else "no room"
        notice = (
            f"memory has {has} ({room.name}), less than one slot of {amount(one.slot_bytes)}: staging uses "
            f"{amount(one.segment_bytes)} on the disk of {self._root} instead, at about {speed / MIB:.0f} MiB/s. Each save "
            f"may stall training for up to {one.slot_bytes / speed:.1f} s, and every byte is written to that disk twice; "
            + (f"to avoid this, {room.remedy}" if room.remedy else f"{short} more memory would avoid this")
        )
        return Spilled(fd, one, notice)


def refusal(label: str, asked: Geometry, taken: int, room: SegmentRoom, why: str) -> LimitExceeded:
    one = asked._replace(slots=1)
    return LimitExceeded(
        f"{label} needs {one.segment_bytes} bytes of shared memory for one slot, {asked.segment_bytes} for "
        f"{asked.slots}; {taken} are reserved, and {room.bytes} are left of {room.name}{why}",
        hint=room.remedy or "free memory, start the daemon with a larger --arena-bytes-max or --run-share, or save less",
        needed=one.segment_bytes,
        taken=taken,
        left=room.bytes,
    )


def emptier(fd: int, geometry: Geometry) -> Callable[[int], None]:
    """Discards the content of a slot of a spilled segment: otherwise each page is read in before it is overwritten."""
    return lambda slot: scratch.empty(fd, geometry.data_offset(slot), geometry.data_bytes)
