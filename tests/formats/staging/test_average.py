"""The bytes of an average: what any process reads of them after another one has died in the middle of writing."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging import arena, average
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.average import AverageHandover, AverageRecord, AverageRule, AverageState

OWNER = SegmentOwner("llama", 3, 8, 2)


@pytest.fixture
def memory() -> memoryview:
    made = average.geometry(10_000, 100, 4096)
    found = memoryview(bytearray(made.segment_bytes))
    average.write_superblock(found, made, OWNER)
    return found


def test_a_segment_says_what_it_is_and_whose(memory: memoryview) -> None:
    """Its sizes and owner come back; a segment of slots is none, and the other way round."""
    assert average.read_superblock(memory) == average.geometry(10_000, 100, 4096)
    assert average.read_owner(memory) == OWNER
    with pytest.raises(InvalidRequest):
        arena.read_superblock(memory)
    slots = memoryview(bytearray(arena.geometry(1, 4096, 4096).segment_bytes))
    arena.write_superblock(slots, arena.geometry(1, 4096, 4096), OWNER)
    with pytest.raises(InvalidRequest, match="not an average"):
        average.read_superblock(slots)
    memory[8] += 1
    with pytest.raises(InvalidRequest, match="version"):
        average.read_superblock(memory)


@pytest.mark.parametrize(("data", "chunk"), [(-1, 4096), (1, 100), (1, 0)])
def test_sizes_that_cannot_be_are_refused(data: int, chunk: int) -> None:
    """Nothing negative, and chunks of whole pages."""
    with pytest.raises(InvalidRequest):
        average.geometry(data, 10, chunk)
    with pytest.raises(LimitExceeded):
        average.geometry(2**46, 10)


def test_a_record_that_is_torn_leaves_the_one_before(memory: memoryview) -> None:
    """Whatever bytes of the newer one are wrong, the older one holds."""
    assert average.read_record(memory) == AverageRecord()
    for number in (1, 2, 3):
        average.write_record(memory, AverageRecord(number=number, n=number))
    assert average.read_record(memory).number == 3
    newer = 2 * 4096 + 3 % 2 * 4096
    for at in range(newer, newer + 60):
        kept = memory[at]
        memory[at] ^= 0xFF
        assert average.read_record(memory).number == 2, at
        memory[at] = kept
    assert average.read_record(memory).number == 3


def test_progress_is_of_one_fold_alone(memory: memoryview) -> None:
    """The notes of a fold say nothing of the next one."""
    average.note_journaled(memory, 7, 4)
    average.note_copied(memory, 7, 3)
    assert average.read_progress(memory, 7) == (4, 3)
    assert average.read_progress(memory, 8) == (0, 0)


def test_an_update_is_free_taken_sealed_and_free(memory: memoryview) -> None:
    """And what was decided last stays, whatever becomes of the place."""
    made = average.read_superblock(memory)
    average.decide(memory, 4)
    average.take(memory, 5)
    assert average.read_rank(memory)[:2] == (SlotState.LEASED, 5)
    assert average.read_rank(memory).decided == 4
    with pytest.raises(InvalidRequest):
        average.read_table(memory, made)
    average.seal(memory, made, 5, b"{}")
    assert average.read_table(memory, made) == b"{}"
    assert average.read_rank(memory).decided == 5
    average.free(memory)
    assert average.read_rank(memory).state is SlotState.FREE
    with pytest.raises(LimitExceeded):
        average.seal(memory, made, 6, bytes(5000))


def test_what_is_missing_is_counted_by_its_reason() -> None:
    """Of the updates before a save, those that are not in the average were skipped, lost or else dropped."""
    rule = AverageRule("master", 0.99, 10)
    record = AverageRecord(number=14, folded=14, seeded=4, n=107, own=7, step=1140, dropped=2, skipped=1, lost=1, rule=rule)
    state = average.state_at(record, AverageHandover(0, 10, after=14, layout="x", skipped=1, lost=1))
    assert state == AverageState("master", 0.99, 10, "bias", n=107, step=1140, dropped=3, skipped=2, lost=2)
    assert average.decode_state(average.encode_state(state)) == state
    assert average.state_at(AverageRecord(), AverageHandover(0, 10, 3, "x")) is None
    with pytest.raises(InvalidRequest):
        average.decode_state("[]")
