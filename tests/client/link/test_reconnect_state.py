"""What a rank answers itself while it has no daemon, and what it brings to the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from holdfast.link.reconnect_state import ReconnectState
from holdfast_formats.errors import GenerationDropped, RoundAborted, from_problem
from holdfast_formats.root_files import RootMark
from holdfast_formats.staging import arena, wire
from holdfast_formats.staging.arena import SlotHeader, SlotState

GEOMETRY = arena.geometry(1, 4096, 4096)
HELLO = wire.Hello(id=0, run="r", rank=0, world=1, launch="l")
WELCOME = wire.Welcome(reply_to=0, attempt=3, node="n", root="", mark=RootMark(id="r"), version="9")
ABANDONED = RoundAborted("stopped").problem()


@pytest.fixture
def state() -> Iterator[ReconnectState]:
    """A rank that has said hello, with a segment of one free slot."""
    memory = memoryview(bytearray(GEOMETRY.segment_bytes))
    arena.write_superblock(memory, GEOMETRY)
    arena.write_header(memory, GEOMETRY, 0, SlotHeader(SlotState.FREE, 1, 1, 0, 0, 0))
    fd = os.memfd_create("segment")
    os.pwrite(fd, memory, 0)
    made = ReconnectState()
    made.note(HELLO, WELCOME)
    made.keep_segment(fd)
    os.close(fd)
    yield made
    made.close()


def lease(step: int, **options: object) -> wire.Lease:
    return wire.Lease.model_validate({"id": step, "step": step, **options})


def granted(state: ReconnectState, *steps: int) -> None:
    for step in steps:
        state.note(lease(step, turn=step % 2), wire.Granted(reply_to=step, slot=0, deadline_s=1))


def test_open_saves_are_brought_by_step_with_their_turns(state: ReconnectState) -> None:
    granted(state, 5, 4, 6, 7)
    state.ended(6)
    state.note(wire.Abandon(id=9, slot=0, step=7, problem=ABANDONED), wire.Done(reply_to=9))
    assert state.attach(8) == wire.Attach(id=8, open=(4, 5), turns=(0, 1))
    seal = wire.Seal(id=9, slot=0, step=5, table_digest="d")
    state.note(seal, wire.Sealed(reply_to=9))
    assert state.attach(8).open == (4, 5), "a sealed save is open until its outcome"
    state.note(seal, wire.Failed(reply_to=9, problem=ABANDONED))
    assert state.attach(8).open == (4,)


def test_seals_and_abandoned_saves_are_answered_and_kept_for_the_next_daemon(state: ReconnectState) -> None:
    granted(state, 4, 5)
    seal = wire.Seal(id=1, slot=0, step=4, table_digest="d")
    abandon = wire.Abandon(id=2, slot=0, step=5, problem=ABANDONED)
    assert state.answer(seal, may_lease=False) == wire.Sealed(reply_to=1)
    assert state.answer(abandon, may_lease=False) == wire.Done(reply_to=2)
    assert state.unsaid == [seal, abandon] and state.attach(3).open == (4,)


def test_a_lease_takes_a_free_slot_and_else_the_save_is_dropped(state: ReconnectState) -> None:
    assert state.answer(lease(4), may_lease=True) == wire.Granted(reply_to=4, slot=0, deadline_s=0.0)
    assert state.attach(0).open == (4,)
    assert state.answer(lease(5, policy="wait"), may_lease=True) is None
    reply = state.answer(lease(5, policy="newest-wins"), may_lease=True)
    assert isinstance(reply, wire.Failed) and isinstance(from_problem(reply.problem), GenerationDropped)
    (unsaid,) = state.unsaid
    assert isinstance(unsaid, wire.Abandon) and unsaid.step == 5 and unsaid.problem == reply.problem


def test_what_needs_the_daemon_waits_for_it(state: ReconnectState) -> None:
    for message, may_lease in (
        (lease(4), False),
        (lease(4, existing="same"), True),
        (wire.Choose(id=1, turn=0), True),
    ):
        assert state.answer(message, may_lease) is None
    segment = wire.Segment(reply_to=0, slots=1, data_bytes=1, table_bytes_max=1, spilled=True)
    state.note(wire.Reserve(id=0, slots=1, data_bytes=1, table_bytes=1), segment)
    assert state.answer(lease(4), may_lease=True) is None, "of a file on disk"
    assert ReconnectState().answer(lease(4), may_lease=True) is None, "before there is a segment"


def test_the_first_hello_is_kept(state: ReconnectState) -> None:
    state.note(HELLO.model_copy(update={"run": "other"}), WELCOME)
    assert state.hello is not None and state.attempt == 3
    assert (state.hello.run, state.hello.root) == ("r", RootMark(id="r"))


@pytest.mark.parametrize("keep", [ReconnectState.keep_segment, ReconnectState.keep_average])
def test_a_copy_of_the_newest_descriptor_is_kept(state: ReconnectState, keep: Callable[[ReconnectState, int], None]) -> None:
    pipes = [os.pipe(), os.pipe()]
    for read, write in pipes:
        os.set_blocking(read, False)
        keep(state, write)
        os.close(write)
    assert os.read(pipes[0][0], 1) == b"", "the one before is closed"
    with pytest.raises(BlockingIOError):
        os.read(pipes[1][0], 1)
    state.close()
    assert os.read(pipes[1][0], 1) == b""
    for read, _ in pipes:
        os.close(read)
