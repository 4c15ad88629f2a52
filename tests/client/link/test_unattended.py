"""unattended: which slot a rank takes for itself while no daemon is there to lease it one, and that training goes on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, SaveWarning
from holdfast.link import unattended
from holdfast_formats import memory_bounds
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_service.storage import libc
from tests.daemons import RunningDaemon, running

GEOMETRY = arena.geometry(3, 4096, 4096)


@pytest.fixture
def segment() -> Iterator[int]:
    """A segment of three free slots, which held steps 30, 10 and 20."""
    fd = os.memfd_create("segment")
    memory = memoryview(bytearray(GEOMETRY.segment_bytes))
    arena.write_superblock(memory, GEOMETRY)
    for slot, step in enumerate((30, 10, 20)):
        arena.write_header(memory, GEOMETRY, slot, SlotHeader(SlotState.FREE, step, 1, 0, 0, 0))
    os.pwrite(fd, memory, 0)
    yield fd
    os.close(fd)


def headers(fd: int) -> list[SlotHeader]:
    memory = memoryview(os.pread(fd, GEOMETRY.segment_bytes, 0))
    return [arena.read_header(memory, GEOMETRY, slot) for slot in range(GEOMETRY.slots)]


def test_the_slot_of_the_oldest_step_is_taken_first(segment: int) -> None:
    """The newest checkpoint's memory goes last; where all are taken there is none."""
    assert [unattended.take_slot(segment, step, 1) for step in (40, 50, 60, 70)] == [1, 2, 0, None]
    assert [(h.state, h.step, h.attempt) for h in headers(segment)] == [(SlotState.LEASED, s, 1) for s in (60, 40, 50)]


def test_what_was_leased_unheard_is_taken(segment: int) -> None:
    """The daemon died between writing the lease and saying so: the rank has that slot, and no second one."""
    assert unattended.take_slot(segment, 40, 1) == unattended.take_slot(segment, 40, 1) == 1
    assert unattended.take_slot(segment, 40, 2) == 2, "of another attempt it is not"


def test_a_slot_that_is_read_is_not_taken(segment: int) -> None:
    """Somebody restores from it: the next one is taken."""
    reading = os.open(f"/proc/self/fd/{segment}", os.O_RDWR)
    fcntl.fcntl(reading, fcntl.F_OFD_SETLK, arena.slot_lock(GEOMETRY, 1, fcntl.F_RDLCK))
    assert unattended.take_slot(segment, 40, 1) == 2
    os.close(reading)
    assert unattended.take_slot(segment, 50, 1) == 1


def test_slots_with_memory_are_taken_first(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one needs memory: it is taken only while there is some."""
    begin = GEOMETRY.data_offset(1)
    libc.punch_hole(segment, begin, GEOMETRY.slot_bytes - arena.PAGE_BYTES)
    assert unattended.take_slot(segment, 40, 1) == 2, "step 20; the older step 10 has no memory any more"
    monkeypatch.setattr(memory_bounds, "can_touch", lambda size: False)
    assert [unattended.take_slot(segment, step, 1) for step in (50, 60)] == [0, None]
    monkeypatch.setattr(memory_bounds, "can_touch", lambda size: size == GEOMETRY.slot_bytes)
    assert unattended.take_slot(segment, 60, 1) == 1


def test_what_is_no_segment_gives_no_slot() -> None:
    """Nothing is written into memory that does not say how it is divided."""
    for size in (0, 4096, GEOMETRY.segment_bytes):
        fd = os.memfd_create("other")
        os.ftruncate(fd, size)
        assert unattended.take_slot(fd, 1, 1) is None
        os.close(fd)


def test_without_a_free_slot_the_new_save_gives_way(tmp_path: Path) -> None:
    """The policy is not to wait: the save is dropped at once, by name, and the next daemon commits those before it."""
    root = tmp_path / "root"
    state = {"x": torch.zeros(1000)}
    with running(root) as first:
        checkpointer = Checkpointer("r", state, at=first.socket, slots=2)
        checkpointer.save(1, wait="durable")
        first.kill()
        tickets = [checkpointer.save(step) for step in (2, 3, 4)]
        assert tickets[2].dropped and "the daemon is gone" in str(tickets[2].error)
        second = RunningDaemon(root)
        assert [ticket.result(180).step for ticket in tickets[:2]] == [2, 3]
        with pytest.warns(SaveWarning, match="r@4 was dropped"):
            checkpointer.save(4, wait="durable")
        checkpointer.close()
        assert second.stop() == 0


def test_saves_go_on_while_the_daemon_is_dead(tmp_path: Path) -> None:
    """Each call returns although there is no daemon; the next one commits what was saved, and goes on as before."""
    root = tmp_path / "root"
    state = {"x": torch.zeros(1000)}
    with running(root) as first:
        checkpointer = Checkpointer("r", state, at=first.socket, slots=3)
        checkpointer.save(1, wait="durable")
        first.kill()
        tickets = []
        for step in (2, 3):
            state["x"].fill_(step)
            tickets.append(checkpointer.save(step, wait="staged"))
        assert not any(ticket.done for ticket in tickets) and all(ticket.staged for ticket in tickets)
        second = RunningDaemon(root)
        assert [ticket.result(180).step for ticket in tickets] == [2, 3]
        state["x"].fill_(4)
        checkpointer.save(4, wait="durable")
        for step in (2, 3, 4):
            assert checkpointer.restore(step=step) == step and float(state["x"][0]) == step
        checkpointer.close()
        assert second.stop() == 0
