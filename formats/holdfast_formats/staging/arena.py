"""The staging arena's bytes: one shared-memory segment a rank, a superblock, then the rank's slots.

    segment    superblock page · slot 0 · slot 1 · …                      each slot begins at a 4 KiB boundary
    slot       header page · data (data_bytes, 4 KiB aligned) · table (table_bytes_max, 4 KiB aligned)

All numbers are little-endian. A slot's header has its state and seal, so a daemon that finds a segment without knowing
its rank recognises complete slots: the seal word is written last and is the digest of the table, which states
everything else. Single 8-byte stores to aligned shared memory are not torn on the supported machines (x86-64, AArch64).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded

MAGIC = b"HOLDFAST"
VERSION = 2
PAGE_BYTES = 4096
SLOTS_MAX = 64
SEGMENT_BYTES_MAX = 2**46
_SUPERBLOCK = struct.Struct("<8sIIQQIIQ128s")  # magic, version, slots, data, table, rank, world, attempt, run
_HEADER = struct.Struct("<8sIIQQQQQ")  # magic, version, state, step, attempt, data bytes used, table bytes, seal word
_LOCK = struct.Struct("@hhqqi4x")  # the kernel's struct flock: kind, whence, start, length, pid
_STATE_OFFSET = 12
_SEAL_OFFSET = 48
_FILLED_OFFSET = 56  # the seal word once more, when the daemon has put into the slot what its table leaves to it
_EMPTIED_OFFSET = 64  # how often the slot's memory was returned to the system


class SlotState(IntEnum):
    """Free → leased → sealed → free. The daemon leases and frees, the rank seals."""

    FREE = 0
    LEASED = 1
    SEALED = 2


class Geometry(NamedTuple):
    """The sizes of a segment: the number of slots, and each one's room for data and for its table, in bytes."""

    slots: int
    data_bytes: int
    table_bytes_max: int

    @property
    def slot_bytes(self) -> int:
        return PAGE_BYTES + self.data_bytes + self.table_bytes_max

    @property
    def segment_bytes(self) -> int:
        return PAGE_BYTES + self.slots * self.slot_bytes

    def header_offset(self, slot: int) -> int:
        """The offset of a slot; `InvalidRequest` for a slot that the segment does not have."""
        if not 0 <= slot < self.slots:
            raise InvalidRequest(f"slot {slot} does not exist in a segment of {self.slots} slots")
        return PAGE_BYTES + slot * self.slot_bytes

    def data_offset(self, slot: int) -> int:
        return self.header_offset(slot) + PAGE_BYTES

    def table_offset(self, slot: int) -> int:
        return self.data_offset(slot) + self.data_bytes


class SegmentOwner(NamedTuple):
    """The rank that a segment belongs to: one rank of one attempt of a run."""

    run: str
    rank: int
    world: int
    attempt: int


class SlotHeader(NamedTuple):
    state: SlotState
    step: int
    attempt: int
    data_bytes: int
    table_bytes: int
    seal: int


def page_aligned(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def geometry(slots: int, data_bytes: int, table_bytes: int) -> Geometry:
    """The geometry of a segment whose slots hold this much; `LimitExceeded` or `InvalidRequest` for impossible sizes."""
    if not 1 <= slots <= SLOTS_MAX or data_bytes < 0 or table_bytes < 0:
        raise InvalidRequest(f"a segment of {slots} slots of {data_bytes} + {table_bytes} bytes is not possible")
    made = Geometry(slots, page_aligned(data_bytes), page_aligned(max(table_bytes, 1)))
    if made.segment_bytes > SEGMENT_BYTES_MAX:
        raise LimitExceeded(f"an arena segment of {made.segment_bytes} bytes is over the limit of {SEGMENT_BYTES_MAX}")
    return made


def write_superblock(memory: memoryview, geometry: Geometry, owner: SegmentOwner | None = None) -> None:
    """Write the segment's sizes and owner; a segment without an owner cannot be adopted by another daemon."""
    rank, world, attempt, run = (owner.rank, owner.world, owner.attempt, owner.run.encode()) if owner else (0, 0, 0, b"")
    slots, data, table = geometry.slots, geometry.data_bytes, geometry.table_bytes_max
    _SUPERBLOCK.pack_into(memory, 0, MAGIC, VERSION, slots, data, table, rank, world, attempt, run)


def read_superblock(memory: memoryview) -> Geometry:
    """The geometry that a segment states; `InvalidRequest` or `LimitExceeded` if it is not one of ours or is cut short."""
    geometry = read_measures(memory)
    if geometry.segment_bytes > len(memory):
        raise InvalidRequest(f"a segment of {len(memory)} bytes claims to hold {geometry.segment_bytes}")
    return geometry


def read_measures(memory: memoryview) -> Geometry:
    """The geometry in a segment's first page, whether or not the rest exists."""
    if len(memory) < PAGE_BYTES:
        raise InvalidRequest(f"a segment of {len(memory)} bytes is not a staging arena")
    magic, version, slots, data_bytes, table_bytes_max, *_ = _SUPERBLOCK.unpack_from(memory, 0)
    if magic != MAGIC or version != VERSION:
        raise InvalidRequest("shared memory does not hold a staging arena of this version")
    measures = geometry(slots, data_bytes, table_bytes_max)
    if (measures.data_bytes, measures.table_bytes_max) != (data_bytes, table_bytes_max):
        raise InvalidRequest(f"a segment with slots of {data_bytes} + {table_bytes_max} bytes, which are not whole pages")
    return measures


def read_owner(memory: memoryview) -> SegmentOwner:
    """The owner of a segment; `InvalidRequest` if it has none or an invalid one. Read the superblock first."""
    *_, rank, world, attempt, name = _SUPERBLOCK.unpack_from(memory, 0)
    run = name.rstrip(b"\0").decode(errors="replace")
    if not naming.is_run_name(run) or not rank < world:
        raise InvalidRequest(f"a segment names rank {rank} of {world} of run {run!r}, which is not valid")
    return SegmentOwner(run, rank, world, attempt)


def write_header(memory: memoryview, geometry: Geometry, slot: int, header: SlotHeader) -> None:
    _HEADER.pack_into(
        memory,
        geometry.header_offset(slot),
        MAGIC,
        VERSION,
        header.state,
        header.step,
        header.attempt,
        header.data_bytes,
        header.table_bytes,
        header.seal,
    )
    struct.pack_into("<Q", memory, geometry.header_offset(slot) + _FILLED_OFFSET, 0)


def read_header(memory: memoryview, geometry: Geometry, slot: int) -> SlotHeader:
    """A slot's header; `InvalidRequest` if the bytes are not valid."""
    magic, version, state, *rest = _HEADER.unpack_from(memory, geometry.header_offset(slot))
    if magic != MAGIC or version != VERSION or state not in tuple(SlotState):
        raise InvalidRequest(f"slot {slot} has no valid header")
    header = SlotHeader(SlotState(state), *rest)
    if header.data_bytes > geometry.data_bytes or header.table_bytes > geometry.table_bytes_max:
        raise InvalidRequest(f"slot {slot} claims {header.data_bytes} + {header.table_bytes} bytes, more than it has")
    return header


def seal(memory: memoryview, geometry: Geometry, slot: int, header: SlotHeader, table_digest: str) -> None:
    """Mark a slot complete: everything but the seal word first, then the word, then the state."""
    write_header(memory, geometry, slot, header._replace(state=SlotState.LEASED, seal=0))
    at = geometry.header_offset(slot)
    struct.pack_into("<Q", memory, at + _SEAL_OFFSET, int(table_digest, 16))
    struct.pack_into("<I", memory, at + _STATE_OFFSET, SlotState.SEALED)


def mark_filled(memory: memoryview, geometry: Geometry, slot: int) -> None:
    """Mark that the slot has what its table leaves to the daemon (`AverageHandover`)."""
    at = geometry.header_offset(slot)
    memory[at + _FILLED_OFFSET : at + _FILLED_OFFSET + 8] = memory[at + _SEAL_OFFSET : at + _SEAL_OFFSET + 8]


def is_filled(memory: memoryview, geometry: Geometry, slot: int) -> bool:
    """Whether the slot was marked filled for its current sealed table."""
    at = geometry.header_offset(slot)
    seal, filled = struct.unpack_from("<QQ", memory, at + _SEAL_OFFSET)
    return bool(seal) and seal == filled


def emptied(memory: memoryview, geometry: Geometry, slot: int) -> int:
    """How often the memory of this slot was returned to the system. What a process has page-locked before is not the
    slot's memory any more.
    """
    (count,) = struct.unpack_from("<Q", memory, geometry.header_offset(slot) + _EMPTIED_OFFSET)
    return int(count)


def mark_emptied(memory: memoryview, geometry: Geometry, slot: int) -> None:
    """Mark a free slot as empty, before its memory is returned to the system."""
    write_header(memory, geometry, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
    count = emptied(memory, geometry, slot) + 1
    struct.pack_into("<Q", memory, geometry.header_offset(slot) + _EMPTIED_OFFSET, count)


def slot_lock(geometry: Geometry, slot: int, kind: int) -> bytes:
    """The argument of `F_OFD_SETLK` that locks a slot: its header's first byte, shared by readers, exclusive for a
    lease.

    An OFD lock belongs to an open file description, so each reader opens the segment again, and the lock ends with the
    reader. It outlives the daemon, so no new daemon leases a slot that is being read.
    """
    return _LOCK.pack(kind, 0, geometry.header_offset(slot), 1, 0)


def set_state(memory: memoryview, geometry: Geometry, slot: int, state: SlotState) -> None:
    struct.pack_into("<I", memory, geometry.header_offset(slot) + _STATE_OFFSET, state)
