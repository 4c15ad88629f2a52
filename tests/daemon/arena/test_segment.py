"""What a slot holds is what its table states, and the table is what it was sealed with, or nothing is taken from it (I7)."""

from __future__ import annotations

import os

import pytest

from holdfast.read.held_slots import HeldSlot
from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.region import Box
from holdfast_formats.staging import arena, slot_table
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from tests.daemon.saver_world import RUN, SIZE, Rank, SaverWorld, saver_world


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
