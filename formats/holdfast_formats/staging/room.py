"""How many of the slots that a rank asks for fit into the memory there is, and what it is told if these are fewer."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_formats.staging.arena import Geometry

GIB = 2**30
MIB = 2**20


class SegmentRoom(NamedTuple):
    """How many bytes a new segment may have, and which limit applies; `remedy` says how to have more, where that is not said
    in general.
    """

    bytes: int
    name: str
    remedy: str = ""


def fitting(asked: Geometry, room: SegmentRoom) -> int:
    """How many of the requested slots fit; 0 if not even one does."""
    counts = range(asked.slots, 0, -1)
    return next((count for count in counts if asked._replace(slots=count).segment_bytes <= room.bytes), 0)


def fewer_notice(asked: Geometry, slots: int, room: SegmentRoom) -> str:
    """The notice for a rank that gets fewer slots than requested."""
    return (
        f"reserved {slots} slot{'s' * (slots > 1)} instead of {asked.slots}: memory has room for "
        f"{amount(room.bytes)} ({room.name}), but {asked.slots} slots of {amount(asked.slot_bytes)} need "
        f"{amount(asked.segment_bytes - room.bytes)} more. A save that starts while {slots} "
        f"{'are' if slots > 1 else 'is'} being written finds no free slot"
    )


def amount(size: int) -> str:
    """A number of bytes as people read it."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
