"""arena: a segment's superblock, slot headers, states and the seal word."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import PAGE_BYTES, Geometry, SegmentOwner, SlotHeader, SlotState

SMALL = arena.geometry(2, 5000, 100)
U64 = st.integers(0, 2**64 - 1)


def segment(made: Geometry = SMALL) -> bytearray:
    """A segment with a superblock and free slots."""
    memory = bytearray(made.segment_bytes)
    arena.write_superblock(memoryview(memory), made)
    for slot in range(made.slots):
        arena.write_header(memoryview(memory), made, slot, SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0))
    return memory


@given(st.integers(1, arena.SLOTS_MAX), st.integers(0, 2**30), st.integers(0, 2**20))
def test_slots_tile_the_segment_in_pages(slots: int, data_bytes: int, table_bytes: int) -> None:
    """Header, data and table of every slot begin at a page and follow each other without hole to the segment's end."""
    made = arena.geometry(slots, data_bytes, table_bytes)
    end = PAGE_BYTES
    for slot in range(slots):
        assert made.header_offset(slot) == end
        assert made.data_offset(slot) == end + PAGE_BYTES
        assert made.table_offset(slot) == made.data_offset(slot) + made.data_bytes
        end = made.table_offset(slot) + made.table_bytes_max
        assert end % PAGE_BYTES == 0
    assert end == made.segment_bytes
    assert data_bytes <= made.data_bytes < data_bytes + PAGE_BYTES
    assert made.table_bytes_max >= 1
    assert table_bytes <= made.table_bytes_max <= table_bytes + PAGE_BYTES


@pytest.mark.parametrize("measures", [(0, 1, 1), (arena.SLOTS_MAX + 1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_impossible_geometries_are_refused(measures: tuple[int, int, int]) -> None:
    """No slots, too many, or negative room."""
    with pytest.raises(InvalidRequest, match="not possible"):
        arena.geometry(*measures)


def test_an_arena_has_a_largest_size() -> None:
    """A segment that no machine has is refused by its limit."""
    with pytest.raises(LimitExceeded):
        arena.geometry(2, arena.SEGMENT_BYTES_MAX, 0)


def test_a_segment_describes_itself() -> None:
    """Superblock and headers read back; the bytes are where docs/format.md says."""
    memory = segment()
    view = memoryview(memory)
    assert arena.read_superblock(view) == SMALL
    assert struct.unpack_from("<8sIIQQ", memory) == (b"HOLDFAST", 2, 2, 8192, 4096)
    header = SlotHeader(SlotState.LEASED, 500, 2, 4999, 77, 2**64 - 1)
    arena.write_header(view, SMALL, 1, header)
    assert arena.read_header(view, SMALL, 1) == header
    assert arena.read_header(view, SMALL, 0).state is SlotState.FREE
    at = SMALL.header_offset(1)
    assert struct.unpack_from("<8sIIQQQQQ", memory, at) == (b"HOLDFAST", 2, 1, 500, 2, 4999, 77, 2**64 - 1)


def test_a_segment_says_whose_it_is() -> None:
    """Run, rank, world and attempt read back; the longest name fits, and a segment of nobody says so by refusing."""
    view = memoryview(segment())
    for run in ("r", "R" + 127 * "x"):
        owner = SegmentOwner(run, 3, 8, 2**40)
        arena.write_superblock(view, SMALL, owner)
        assert arena.read_superblock(view) == SMALL and arena.read_owner(view) == owner
    arena.write_superblock(view, SMALL)
    with pytest.raises(InvalidRequest, match="which is not valid"):
        arena.read_owner(view)


@pytest.mark.parametrize("owner", [(8, 8, 1, b"r"), (0, 1, 1, b"../x"), (0, 1, 1, b"\xff\xfe"), (0, 0, 0, b"r")])
def test_an_owner_that_cannot_be_is_refused(owner: tuple[int, int, int, bytes]) -> None:
    """A rank outside its world, a run name that is a path or no text."""
    memory = segment()
    struct.pack_into("<IIQ128s", memory, 32, *owner)
    with pytest.raises(InvalidRequest, match="which is not valid"):
        arena.read_owner(memoryview(memory))


def test_a_slot_goes_from_free_to_sealed_and_back() -> None:
    """Sealing states the step, the sizes and the table's digest; setting a state changes nothing else."""
    view = memoryview(segment())
    header = SlotHeader(SlotState.FREE, 500, 2, 4999, 77, 0)
    arena.seal(view, SMALL, 1, header, "fedcba9876543210")
    sealed = header._replace(state=SlotState.SEALED, seal=0xFEDCBA9876543210)
    assert arena.read_header(view, SMALL, 1) == sealed
    assert f"{sealed.seal:016x}" == "fedcba9876543210"
    arena.set_state(view, SMALL, 1, SlotState.FREE)
    assert arena.read_header(view, SMALL, 1) == sealed._replace(state=SlotState.FREE)
    assert arena.read_header(view, SMALL, 0) == SlotHeader(SlotState.FREE, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("slot", [-1, 2, 2**40])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    """A slot number from a peer never leads outside the segment."""
    view = memoryview(segment())
    with pytest.raises(InvalidRequest, match="does not exist in a segment of 2"):
        arena.read_header(view, SMALL, slot)
    with pytest.raises(InvalidRequest, match="does not exist in a segment of 2"):
        arena.set_state(view, SMALL, slot, SlotState.SEALED)


@pytest.mark.parametrize(
    "superblock",
    [
        (b"HOLDFASX", 2, 2, 8192, 4096),
        (b"HOLDFAST", 1, 2, 8192, 4096),
        (b"HOLDFAST", 2, 0, 8192, 4096),
        (b"HOLDFAST", 2, 3, 8192, 4096),
        (b"HOLDFAST", 2, 2, 8191, 4096),
        (b"HOLDFAST", 2, 2, 8192, 0),
        (b"HOLDFAST", 2, 2, 2**63, 4096),
    ],
)
def test_a_superblock_that_cannot_be_true_is_refused(superblock: tuple[bytes, int, int, int, int]) -> None:
    """Another magic or version, no slots, more than the segment holds, or room that is not whole pages."""
    memory = segment()
    struct.pack_into("<8sIIQQ", memory, 0, *superblock)
    with pytest.raises((InvalidRequest, LimitExceeded)):
        arena.read_superblock(memoryview(memory))


def test_a_segment_cut_short_is_refused() -> None:
    """Less than a page, and less than the superblock claims."""
    memory = segment()
    for size in (0, PAGE_BYTES - 1, SMALL.segment_bytes - 1):
        with pytest.raises(InvalidRequest):
            arena.read_superblock(memoryview(memory)[:size])


@pytest.mark.parametrize(
    "header",
    [
        (b"HOLDFASX", 2, 0, 0, 0, 0, 0, 0),
        (b"HOLDFAST", 1, 0, 0, 0, 0, 0, 0),
        (b"HOLDFAST", 2, 3, 0, 0, 0, 0, 0),
        (b"HOLDFAST", 2, 0, 0, 0, 8193, 0, 0),
        (b"HOLDFAST", 2, 0, 0, 0, 0, 4097, 0),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(header: tuple[bytes, int, int, int, int, int, int, int]) -> None:
    """Another magic or version, an unknown state, or more bytes than the slot has."""
    memory = segment()
    struct.pack_into("<8sIIQQQQQ", memory, SMALL.header_offset(0), *header)
    with pytest.raises(InvalidRequest, match="slot 0"):
        arena.read_header(memoryview(memory), SMALL, 0)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=56, max_size=56))
def test_random_bytes_give_named_errors(superblock: bytes, header: bytes) -> None:
    """Noise in a superblock or a header, whole or behind a right beginning, is refused or harmless."""
    memory = segment()
    for noise in (superblock, memory[:12] + superblock[12:]):
        memory[: len(noise)] = noise
        try:
            assert arena.read_superblock(memoryview(memory)).segment_bytes <= len(memory)
        except CheckpointError:
            continue
    at = SMALL.header_offset(0)
    for noise in (header, memory[at : at + 16] + header[16:]):
        memory[at : at + len(noise)] = noise
        try:
            assert arena.read_header(memoryview(memory), SMALL, 0).data_bytes <= SMALL.data_bytes
        except InvalidRequest:
            continue


@given(U64, U64, st.integers(0, 8192), st.integers(0, 4096), U64)
def test_every_header_reads_back(step: int, attempt: int, data_bytes: int, table_bytes: int, seal: int) -> None:
    """Any numbers that fit their fields."""
    view = memoryview(segment())
    header = SlotHeader(SlotState.LEASED, step, attempt, data_bytes, table_bytes, seal)
    arena.write_header(view, SMALL, 0, header)
    assert arena.read_header(view, SMALL, 0) == header
