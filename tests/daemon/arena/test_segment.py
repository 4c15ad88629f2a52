"""What a slot holds is what its table states, and the table is what it was sealed with, or nothing is taken from it (I7)."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from holdfast.read.held_slots import HeldSlot
from holdfast_formats.digest import digest
from holdfast_formats.errors import ArenaFull, CheckpointError, DaemonGone, GenerationDropped, InvalidRequest
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_formats.staging.slot_pages import CALM_SAVES, RecentNeed, have_pages
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.daemon.arena import budget
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.shares import ShareHolder
from holdfast_service.storage import scratch
from tests.daemon.saver_world import RUN, SIZE, Rank, SaverWorld, content, saver_world


def a_table(rank: Rank, step: int, name: str) -> bytes:
    """A readable table of one tensor; of the same length for names of the same length."""
    held = (StagedFragment(TensorSpec("model", name, "U8", (1, SIZE)), (Box((0, 0), (1, SIZE)),), 0),)
    return slot_table.encode(SlotTable(RUN, step, rank.attempt, 0, 1, ("model",), held, {}, {}))


def write_table(rank: Rank, slot: int, encoded: bytes) -> None:
    at = rank.segment.geometry.table_offset(slot)
    rank.segment.memory[at : at + len(encoded)] = encoded


def test_a_table_that_became_another_is_not_taken() -> None:
    """Another table in its place, readable as it is, is refused: by the digest that came, and by the one in the header."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        slot = rank.lease(1)
        sealed, other = a_table(rank, 1, "w"), a_table(rank, 1, "v")
        assert len(sealed) == len(other)
        write_table(rank, slot, sealed)
        header = SlotHeader(SlotState.LEASED, 1, rank.attempt, SIZE, len(sealed), 0)
        arena.seal(rank.segment.memory, rank.segment.geometry, slot, header, digest(sealed))
        write_table(rank, slot, other)
        for stated in (sealed, other):
            with pytest.raises(InvalidRequest, match="digest"):
                rank.segment.take_sealed(slot, 1, digest(stated))
        write_table(rank, slot, sealed)
        assert rank.segment.take_sealed(slot, 1, digest(sealed)).table.fragments[0].spec.name == "w"


def found(world: SaverWorld, rank: Rank) -> list[int]:
    """The slots that a daemon which starts now would lend to a restart, as holding step 1."""
    holds = MemoryCheckpoints(world.control.lineage_index.launch)
    holds.find([rank.segment])
    parts, fds = holds.lend(RUN, 1)
    for fd in fds:
        os.close(fd)
    return [part.slot for part in parts]


def test_a_slot_whose_table_was_damaged_is_not_held_by_the_next_daemon() -> None:
    """A daemon that finds what its predecessor had committed offers it to a restart only while its table is whole."""
    with saver_world() as world:
        rank = world.saved(1)
        (slot,) = found(world, rank)
        rank.segment.memory[rank.segment.geometry.table_offset(slot) + 3] ^= 1
        assert found(world, rank) == []


def test_a_held_slot_whose_table_became_another_is_not_read() -> None:
    """A rank that restarts reads a held slot by the table that was sealed, and by no other, readable as it may be."""
    with saver_world() as world:
        rank = world.saved(1)
        (part,), (fd,) = world.saver.holds.lend(RUN, 1)
        HeldSlot(fd, part, 1).close()
        write_table(rank, part.slot, a_table(rank, 1, "v"))
        with pytest.raises(DaemonGone):
            HeldSlot(fd, part, 1)
        os.close(fd)


def test_a_slot_that_is_leased_for_another_step_is_not_sealed() -> None:
    """Only the slot that was leased for a step can be sealed for it, whatever stands in another; its own still can."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        mine, other = rank.lease(1), rank.lease(2)
        with pytest.raises(CheckpointError, match="has no lease"):
            rank.fill_and_seal(1, other)
        assert world.committed() == []
        rank.fill_and_seal(1, mine)
        assert rank.wait(1).state == "committed"


def pages(rank: Rank) -> set[int]:
    """The slots that have memory."""
    return have_pages(rank.segment.fd, rank.segment.geometry)


def calm(world: SaverWorld, rank: Rank, first: int) -> int:
    """Save and commit so often that one slot is known to do. Returns the last step."""
    for step in range(first, first + CALM_SAVES):
        rank.save(step)
        assert rank.wait(step).state == "committed"
    world.arena.give_back_spare()
    return step


def test_saves_that_do_not_overlap_have_the_memory_of_one_slot() -> None:
    """Each is written into the slot of the one before; a second slot gets memory with the first overlap."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        assert pages(rank) == {0}
        first, second = rank.lease(20), rank.lease(21)
        rank.fill_and_seal(20, first)
        rank.fill_and_seal(21, second)
        assert (first, second) == (0, 1) and pages(rank) == {0, 1}
        assert rank.wait(21).state == "committed" and set(world.held(21)) == {0}


def test_a_slot_that_saves_no_longer_need_returns_its_memory() -> None:
    """Not that of the in-memory checkpoint: a restart still reads it. The next overlap takes memory again."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        for slot, step in [(rank.lease(step), step) for step in (1, 2)]:
            rank.fill_and_seal(step, slot)
        assert rank.wait(2).state == "committed"
        world.arena.give_back_spare()
        assert pages(rank) == {0, 1}, "the saves overlap"
        before = world.arena.touched_bytes
        last = calm(world, rank, 3)
        ((slot, data),) = world.held(last).values()
        assert pages(rank) == {slot} and data == content(last, 0).tobytes()
        assert world.arena.touched_bytes < before and world.arena.bytes == rank.segment.geometry.segment_bytes
        assert arena.emptied(rank.segment.memory, rank.segment.geometry, 1 - slot) == 1
        taken = [rank.lease(step) for step in (20, 21)]
        assert taken == [slot, 1 - slot]


def test_memory_into_which_a_rank_may_still_write_is_not_returned() -> None:
    """A save is given up for all ranks while one still copies: it has left the slot when it leases the next one."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        for step in (20, 21):
            rank.segment.memory[rank.segment.geometry.data_offset(rank.lease(step))] = 1
        rank.segment._need = RecentNeed()
        for _ in range(CALM_SAVES):
            rank.segment._need.note(1)
        world.saver.give_up(rank.who, 21, CheckpointError("given up"))
        world.saver.give_up(rank.who, 20, CheckpointError("given up"))
        world.arena.give_back_spare()
        assert pages(rank) == {0, 1}
        rank.save(22)
        assert rank.wait(22).state == "committed"
        world.arena.give_back_spare()
        assert pages(rank) == {0}


def test_a_slot_that_is_in_use_after_all_keeps_its_memory() -> None:
    """A reader has locked it, or its rank has leased it by itself while it took this daemon for dead."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        for slot, step in [(rank.lease(step), step) for step in (1, 2)]:
            rank.fill_and_seal(step, slot)
        assert rank.wait(2).state == "committed"
        segment, reading = rank.segment, os.open(f"/proc/self/fd/{rank.segment.fd}", os.O_RDONLY)
        for slot in (0, 1):
            fcntl.fcntl(reading, fcntl.F_OFD_SETLK, arena.slot_lock(segment.geometry, slot, fcntl.F_RDLCK))
            segment._empty_memory(slot)
        os.close(reading)
        arena.write_header(segment.memory, segment.geometry, 1, SlotHeader(SlotState.LEASED, 3, rank.attempt, 0, 0, 0))
        segment._empty_memory(1)
        assert pages(rank) == {0, 1}
        arena.set_state(segment.memory, segment.geometry, 1, SlotState.FREE)
        segment._empty_memory(1)
        assert pages(rank) == {0}


def test_a_slot_whose_memory_is_being_returned_is_leased_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves overlap while the daemon empties a slot: the second one gets it, and is not told that there is no memory."""
    with saver_world() as world, ThreadPoolExecutor(1) as saves:
        (rank,) = world.launch(1)
        for slot, step in [(rank.lease(step), step) for step in (1, 2)]:
            rank.fill_and_seal(step, slot)
        assert rank.wait(2).state == "committed"
        segment, give_back, asked = rank.segment, scratch.give_back, threading.Event()
        leased: list[Future[int]] = []

        def is_gone() -> bool:
            asked.set()
            return False

        def lease(step: int) -> int:
            return segment.lease(step, rank.attempt, 60.0, is_gone)

        def meanwhile(*given: int) -> None:
            lease(20)
            leased.append(saves.submit(lease, 21))
            asked.wait()  # it has found no slot
            give_back(*given)

        monkeypatch.setattr(scratch, "give_back", meanwhile)
        calm(world, rank, 3)
        assert {0, 1} == {*segment.taken, leased[0].result(30)}


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """The limits that the daemon finds on this machine from now on."""
    bounds = [Bound("machine", 2**40, 2**40)]
    monkeypatch.setattr(budget, "find_bounds", lambda: list(bounds))
    return bounds


def test_a_slot_that_memory_has_no_room_for_any_more_is_not_leased(scarce: list[Bound]) -> None:
    """What was reserved has been taken by others: as if there were no second slot, the policy decides, and the error says
    why. With memory again, the slot is leased.
    """
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        rank.lease(20)
        scarce[0] = Bound("machine", 2**20, 0)
        with pytest.raises(ArenaFull, match=r"no memory for another slot of 0\.0 MiB"):
            rank.lease(21)
        with pytest.raises(GenerationDropped, match=r"step 22 was dropped for those before it .*no memory for another"):
            rank.lease(22, "oldest-durable")
        scarce[0] = Bound("machine", 2**40, 2**40)
        assert rank.lease(23) == 1


def test_the_limits_of_the_rank_are_those_of_the_moment(scarce: list[Bound]) -> None:
    """What its control group has left when saves overlap counts, for all that its ranks have reserved there."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        rank.lease(20)

        def told(free: int) -> None:
            bounds = [Bound("memory.max", 0, free, "2:1")]
            rank.segment.count_for(ShareHolder(RUN, limits=world.arena.limits(bounds, "rank 0's")))

        told(rank.segment.geometry.slot_bytes // 4)
        told(rank.segment.geometry.slot_bytes // 4)
        with pytest.raises(ArenaFull, match="no memory"):
            rank.lease(21)
        told(rank.segment.geometry.slot_bytes)
        assert rank.lease(22) == 1


def test_a_slot_that_another_save_may_need_soon_keeps_its_memory() -> None:
    """Its rank touches it ahead of need. Once so many saves have ended in time, its memory is returned."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        for step in range(20, 20 + 2 * CALM_SAVES):
            slot, foreseen = rank.lease(step), rank.segment.foresee()
            assert foreseen == 1 - slot
            rank.segment.memory[rank.segment.geometry.data_offset(foreseen)] = 1
            rank.fill_and_seal(step, slot)
            assert rank.wait(step).state == "committed"
            world.arena.give_back_spare()
            assert pages(rank) == {0, 1}
        calm(world, rank, 100)
        assert len(pages(rank)) == 1


def test_memory_that_is_not_there_is_not_foreseen(scarce: list[Bound]) -> None:
    """Nor is a slot, if all are in use."""
    with saver_world() as world:
        (rank,) = world.launch(1)
        calm(world, rank, 1)
        rank.lease(20)
        scarce[0] = Bound("machine", 2**20, 0)
        assert rank.segment.foresee() is None
        scarce[0] = Bound("machine", 2**40, 2**40)
        assert rank.segment.foresee() == 1
        rank.lease(21)
        assert rank.segment.foresee() is None
