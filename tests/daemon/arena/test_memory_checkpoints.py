"""Holds: the newest commit stays in memory as long as that costs nobody anything, and no longer."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.read.held_slots import HeldSlot
from holdfast_formats.errors import ArenaFull, DaemonGone
from holdfast_formats.staging import arena as formats
from holdfast_formats.staging.arena import SegmentOwner
from holdfast_formats.staging.wire import HeldPart
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.memory_checkpoints import HELD_S, MemoryCheckpoints
from holdfast_service.daemon.arena.peer import PeerProcess
from holdfast_service.daemon.arena.segment import ArenaSegment
from tests.daemon.saver_world import RUN, SIZE, Rank, SaverWorld, content, saver_world
from tests.wings.cluster.exchange.holding_nodes import SIZE as PART_BYTES
from tests.wings.cluster.exchange.holding_nodes import STEP, Holding

GEOMETRY = formats.geometry(2, SIZE, 4096)
WORLD = 2


@contextmanager
def after_a_commit(steps: tuple[int, ...] = (1,)) -> Iterator[tuple[SaverWorld, list[Rank]]]:
    """Two ranks have saved some steps, and all of them are committed and verified."""
    with saver_world() as world:
        ranks = world.launch(WORLD)
        for step in steps:
            for rank in ranks:
                rank.save(step)
            assert {rank.wait(step).state for rank in ranks} == {"committed"}
        yield world, ranks


def reading(world: SaverWorld, step: int) -> list[HeldSlot]:
    """What a restoring rank has: the held slots, locked."""
    parts, fds = world.saver.holds.lend(RUN, step)
    slots = [HeldSlot(fd, part, step) for fd, part in zip(fds, parts, strict=True)]
    for fd in fds:
        os.close(fd)
    return slots


def test_a_newer_commit_takes_the_place_of_an_older_one() -> None:
    """Only the newest step is held, with the bytes of every rank."""
    with after_a_commit((1, 2, 3)) as (world, _):
        assert world.held(1) == world.held(2) == {}
        assert {rank: data for rank, (_, data) in world.held(3).items()} == {
            rank: content(3, rank).tobytes() for rank in range(WORLD)
        }


def test_a_slot_that_is_read_is_not_leased() -> None:
    """With one slot held and locked and the other leased, a third save must wait, until the reader is done."""
    with after_a_commit() as (world, (first, _)):
        held, slots = world.held(1), reading(world, 1)
        assert [bytes(slot.data) for slot in slots] == [content(1, rank).tobytes() for rank in range(WORLD)]
        first.lease(2)
        with pytest.raises(ArenaFull):
            first.lease(3)
        slots[1].close()
        with pytest.raises(ArenaFull):
            first.lease(3)
        slots[0].close()
        assert first.lease(3) == held[0][0]
        assert world.held(1) == {}, "with a slot of one rank, the hold of all ranks has ended"


def test_a_slot_that_was_read_is_leased_although_a_worker_was_forked_meanwhile() -> None:
    """The worker has the open file that the lock belongs to, as long as it lives."""
    with after_a_commit() as (world, (first, _)):
        held, slots = world.held(1), reading(world, 1)
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            first.lease(2)
            for slot in slots:
                slot.close()
            assert first.lease(3) == held[0][0]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_slot_that_was_leased_meanwhile_is_not_read() -> None:
    """A reader that comes too late with what it was told is refused, and does not keep the slot from anybody."""
    with after_a_commit() as (world, (first, _)):
        parts, fds = world.saver.holds.lend(RUN, 1)
        slot = first.lease(2)
        assert slot == parts[0].slot, "the only slot with memory"
        for part, fd in zip(parts, fds, strict=True):
            if part.rank == 0:
                with pytest.raises(DaemonGone, match="something else"):
                    HeldSlot(fd, part, 1)
            os.close(fd)
        world.saver.gone(first.who)
        assert first.segment.lease(9, 1, 0) == slot


def test_a_part_that_is_not_what_was_promised_is_refused() -> None:
    """Another step, or another table than the daemon named: not read."""
    with after_a_commit() as (world, _):
        parts, fds = world.saver.holds.lend(RUN, 1)
        for step, part in ((2, parts[0]), (1, HeldPart(rank=0, slot=parts[0].slot, table_digest="0" * 16))):
            with pytest.raises(DaemonGone):
                HeldSlot(fds[0], part, step)
        for fd in fds:
            os.close(fd)


def test_memory_of_ranks_that_are_gone_is_kept_for_a_while_only() -> None:
    """Ranks leave: their segments stay, the daemon has a reason to; after HELD_S they are given back."""
    with after_a_commit() as (world, ranks):
        assert not world.saver.holds.awaiting
        world.saver.holds.expire(0)
        for rank in ranks:
            rank.leave()
        assert world.saver.holds.awaiting and world.arena.bytes == WORLD * GEOMETRY.segment_bytes
        world.saver.holds.expire(1.0)
        world.saver.holds.expire(1.0 + HELD_S)
        assert world.held(1) != {}
        world.saver.holds.expire(1.1 + HELD_S)
        assert world.held(1) == {} and world.arena.bytes == 0 and not world.saver.holds.awaiting


def test_what_is_kept_gives_way() -> None:
    """To a removal of the checkpoint, to others' need of memory, and to a later attempt that has memory of its own."""
    for reason in ("removed", "needed", "succeeded"):
        with after_a_commit() as (world, ranks):
            for rank in ranks:
                rank.leave()
            if reason == "removed":
                while not world.catalog.checkpoint(RUN, 1).verified:  # which reads it
                    time.sleep(0.01)
                world.control.rotation.remove(RUN, 1, newest=True)
                world.saver.holds.expire(1.0)
            elif reason == "needed":
                rest = 2**30 - world.arena.bytes
                world.arena.reserve(formats.geometry(1, rest, 4096), "another")
            else:
                new = world.launch(WORLD)
                world.saver.holds.succeeded(new[0].who.owner)
                assert world.held(1) != {}, "the other rank may still want to read"
                world.saver.holds.succeeded(new[1].who.owner)
            assert world.held(1) == {}, reason
            assert all(rank.segment.fd < 0 for rank in ranks), reason


def a_peer() -> tuple[PeerProcess, subprocess.Popen[bytes]]:
    """A process that has connected, as the daemon knows it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")  # a name of the kernel's choice
    listener.listen(1)
    code = f"import socket,time; s=socket.socket(socket.AF_UNIX); s.connect({listener.getsockname()!r}); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    connection, _ = listener.accept()
    with connection, listener:
        return PeerProcess(connection), process


def left_behind(arena: Arena) -> tuple[ArenaSegment, subprocess.Popen[bytes]]:
    """A segment of attempt 1 whose conversation is over, and the process that had it, which may live on."""
    peer, process = a_peer()
    segment = arena.reserve(GEOMETRY, "test", SegmentOwner(RUN, 0, 1, 1))
    segment.used_by(process, peer)
    segment.keep(0, lambda: None)
    arena.drop(segment)
    return segment, process


def test_a_later_attempt_takes_over_the_memory_of_a_process_that_is_gone() -> None:
    """The very segment, once nobody can write to it any more; not by another rank, world or size, nor twice."""
    arena = Arena(Budget(2**30))
    segment, process = left_behind(arena)
    heir = SegmentOwner(RUN, 0, 1, 2)
    assert arena.take_over(GEOMETRY, heir) is None, "its process lives and may write"
    process.kill()
    process.wait()
    for geometry, owner in (
        (GEOMETRY, heir._replace(rank=1, world=2)),
        (GEOMETRY, heir._replace(run="other")),
        (GEOMETRY, heir._replace(attempt=1)),
        (formats.geometry(2, 10 * GEOMETRY.data_bytes, 4096), heir),
        (formats.geometry(1, 0, 0), heir),
    ):
        assert arena.take_over(geometry, owner) is None
    assert arena.take_over(GEOMETRY, heir) is segment
    assert segment.owner == heir == formats.read_owner(segment.memory) and not segment.retired
    assert segment.lease(7, 2, 0) == 1, "what is kept in it is still leased last"
    assert arena.take_over(GEOMETRY, heir._replace(attempt=3)) is None
    segment.close()


def test_memory_in_use_is_not_taken_over() -> None:
    """A slot that is still leased or sealed belongs to its save."""
    arena = Arena(Budget(2**30))
    segment, process = left_behind(arena)
    process.kill()
    process.wait()
    slot = segment.lease(5, 1, 0)
    assert arena.take_over(GEOMETRY, SegmentOwner(RUN, 0, 1, 2)) is None
    segment.release(slot)
    assert arena.take_over(GEOMETRY, SegmentOwner(RUN, 0, 1, 2)) is segment
    segment.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_rank_that_saves_first_leaves_the_others_their_memory(committed: bool) -> None:
    """The first rank of the next launch saves before the second one is there, whose memory waits for it, until it leases its
    slot or another step is committed. The step itself is in memory no longer.
    """
    with after_a_commit() as (world, ranks):
        for rank in ranks:
            peer, process = a_peer()
            rank.segment.used_by(rank, peer)
            process.kill()
            process.wait()
            rank.leave()
        attempt = world.control.launches.declare(RUN, "next", WORLD, None)
        for number, rank in enumerate(ranks):
            owner = SegmentOwner(RUN, number, WORLD, attempt)
            assert world.arena.take_over(GEOMETRY, owner) is rank.segment
            world.saver.holds.succeeded(owner)
            world.saver.holds.trains(owner, range(number + 1))
            if number == 0 or not committed:
                rank.segment.lease(2, attempt, 0)
            assert world.held(1) == {} and world.saver.holds.report() == []
            assert world.saver.holds.awaiting is (number == 0)
        if committed:
            world.saver.holds.end(RUN)
        for rank in ranks:
            world.arena.drop(rank.segment)
            for slot in range(GEOMETRY.slots):
                rank.segment.release(slot)
        assert world.arena.bytes == 0


@pytest.fixture
def part() -> Iterator[Holding]:
    """One rank's slots of a save of four ranks: the others are at other nodes."""
    made = Holding("a", 1, slots=2)
    yield made
    made.close()


def found_again(part: Holding, committed: tuple[int, int] | None, partly: bool = True) -> list[int]:
    """The ranks whose slots the next daemon holds."""
    holds = MemoryCheckpoints(lambda run, step: committed, partly)
    holds.find([part.segment])
    return [slot.rank for slot in holds.lent(STEP)]


def test_a_part_is_found_again_if_its_save_was_committed(part: Holding) -> None:
    """By attempt and turn; where other nodes may have the rest, and only there."""
    assert found_again(part, (STEP.attempt, STEP.turn)) == [1]
    assert found_again(part, (STEP.attempt, STEP.turn), partly=False) == []
    for other in (None, (STEP.attempt + 1, STEP.turn), (STEP.attempt, STEP.turn + 1)):
        assert found_again(part, other) == [], other


def test_of_two_saves_that_look_alike_none_is_believed(part: Holding) -> None:
    """The same step of the same attempt, once aborted and once committed: which is which, memory does not say."""
    reading = os.open(f"/proc/self/fd/{part.segment.fd}", os.O_RDONLY)  # so that the second one is beside the first
    fcntl.fcntl(reading, fcntl.F_OFD_SETLK, formats.slot_lock(part.segment.geometry, 0, fcntl.F_RDLCK))
    part.save()
    os.close(reading)
    assert found_again(part, (STEP.attempt, STEP.turn)) == []


def test_a_part_goes_when_the_next_launch_trains(part: Holding) -> None:
    """Not when its ranks of this node have memory: ranks of other nodes may still read. When the last of them saves."""
    owner = SegmentOwner(STEP.run, 0, 8, STEP.attempt + 1)
    part.segment.retire(lambda: None)
    for rank in (0, 1):
        part.holds.succeeded(owner._replace(rank=rank))
    assert part.holds.lent(STEP)
    part.holds.trains(owner._replace(attempt=STEP.attempt), [0])
    part.holds.trains(owner._replace(rank=2), [2, 3])
    assert part.holds.lent(STEP)
    part.holds.trains(owner._replace(rank=3), [2, 3])
    assert part.holds.lent(STEP) == []


def test_what_is_held_is_told(part: Holding) -> None:
    """With the bytes that ranks have put there; and a rank that writes over a header does no harm."""
    (told,) = part.holds.report()
    assert (told.step, told.ranks) == (STEP, 1) and PART_BYTES < told.bytes < PART_BYTES + 4096
    part.segment.memory[formats.PAGE_BYTES : formats.PAGE_BYTES + 8] = bytes(8)
    assert [one.bytes for one in part.holds.report()] == [0] and part.holds.lent(STEP) == []
