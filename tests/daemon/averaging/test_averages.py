"""The averages of a world: updates count for all ranks or for none, and a save takes what came before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded
from holdfast_formats.memory_bounds import Bound
from holdfast_formats.region import Box
from holdfast_formats.staging import arena as slots
from holdfast_formats.staging import average, replica_claims, slot_table
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_formats.staging.average import AverageHandover, AverageRule, AverageStretch, AverageUpdate
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.average_segment import AverageSegment
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.segment import ArenaSegment, SealedSlot, memfd
from holdfast_service.daemon.arena.shares import ShareHolder
from holdfast_service.daemon.averaging import saved_average
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from tests.daemon.memory_keeper import MemoryKeeper
from tests.daemons import wait_until

SIZE = 1000
RULE = AverageRule("master", 0.5, 1, "none")
CREW = RankSetKey("r", 1, 2)
PAGE = 4096


class World:
    """Two ranks, and what their daemon keeps for them; a daemon may be followed by another one."""

    def __init__(self, start: bool = True) -> None:
        self.keeper = MemoryKeeper()
        self.arena = Arena(Budget(None, lambda: [Bound("memory", 2**30, 2**30)]), self.keeper)
        self.averages = Averages(self.arena)
        self.users = [object(), object()]
        room = average.geometry(4 * SIZE, PAGE, PAGE)
        self.ranks = [
            self.averages.reserve(SegmentOwner("r", rank, 2, 1), room, ShareHolder("r"), self.users[rank]) for rank in (0, 1)
        ]
        if start:
            self.averages.start()

    def bring(self, rank: int, number: int, value: float, layout: str = "l", step: int = 0) -> None:
        """A rank seals an update, all elements of which have this value."""
        of = self.ranks[rank]
        average.take(of.memory, number)
        of.brought(0, 4 * SIZE).view(np.float32)[:] = value
        update = AverageUpdate(of.owner, number, step or number, RULE, layout, (AverageStretch(0, SIZE, "F32"),))
        average.seal(of.memory, of.geometry, number, average.encode_update(update))
        self.averages.wake(of.owner)

    def leave_out(self, rank: int, number: int) -> None:
        """A rank brings no update with this number."""
        average.decide(self.ranks[rank].memory, number)
        self.averages.wake(self.ranks[rank].owner)

    def values(self) -> list[float]:
        """What stands in the averages of the two ranks."""
        return [float(of.kept(0, 4).view(np.float32)[0]) for of in self.ranks]

    def wait_for(self, number: int) -> None:
        wait_until(lambda: all(of.record.number == number for of in self.ranks))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.averages.close()


def slot(rank: int, after: int, step: int = 1, said: bool = True, **more: Any) -> SealedSlot:
    """A sealed slot of a save that leaves room for the average."""
    made = slots.geometry(1, 4 * PAGE, PAGE)
    segment = ArenaSegment.make(memfd("slot", made.segment_bytes), made, SegmentOwner("r", rank, 2, 1))
    segment.lease(step, 1, 0.0)
    handover = AverageHandover(PAGE, 4 * SIZE, after, "l", apart=more.pop("apart", ()))
    fragment = StagedFragment(TensorSpec("ema", "w", "F32", (2 * SIZE,)), (Box((rank * SIZE,), (SIZE,)),), PAGE)
    table = SlotTable("r", step, 1, rank, 2, ("ema",), (fragment,), {}, {}, average=handover if said else None, **more)
    encoded = slot_table.encode(table)
    segment.memory[made.table_offset(0) : made.table_offset(0) + len(encoded)] = encoded
    header = SlotHeader(SlotState.LEASED, step, 1, handover.end, len(encoded), 0)
    slots.seal(segment.memory, made, 0, header, digest(encoded))
    return segment.take_sealed(0, step, digest(encoded))


def filled(world: World, parts: dict[int, SealedSlot]) -> CheckpointError | None:
    """Have a save filled, and wait for it."""
    told: list[CheckpointError | None] = []
    ended = threading.Event()
    world.averages.fill(CREW, parts, lambda error: (told.append(error), ended.set()))
    assert ended.wait(180)
    return told[0]


def taken(sealed: SealedSlot) -> float:
    return float(np.frombuffer(sealed.data, np.float32, 1, PAGE)[0])


def test_an_update_counts_once_every_rank_has_sealed_it(world: World) -> None:
    """What one rank leaves out is left out for all; so is what does not fit what is averaged."""
    world.bring(0, 1, 1.0)
    world.bring(1, 1, 10.0)
    world.wait_for(1)
    assert world.values() == [1.0, 10.0]
    world.bring(0, 2, 3.0)
    world.leave_out(1, 2)
    world.wait_for(2)
    wait_until(lambda: world.ranks[0].header.state is SlotState.FREE)
    assert world.values() == [1.0, 10.0]
    world.bring(1, 3, 5.0)
    world.bring(0, 3, 5.0, layout="another")
    world.wait_for(3)
    world.bring(0, 4, 3.0)
    world.bring(1, 4, 20.0)
    world.wait_for(4)
    assert world.values() == [2.0, 15.0]
    assert [of.record.n for of in world.ranks] == [2, 2]
    (told,) = world.averages.report()
    assert (told.run, told.n, told.left_out) == ("r", 2, 2)


def test_a_save_has_what_came_before_it_and_nothing_later() -> None:
    """Whatever has been sealed by the time that the daemon looks."""
    world = World(start=False)
    for number, value in ((1, 1.0), (2, 3.0)):
        if number == 2:
            world.averages.start()
            world.wait_for(1)
        world.bring(0, number, value)
        world.bring(1, number, value)
    world.wait_for(2)
    parts = {rank: slot(rank, after=2) for rank in (0, 1)}
    assert filled(world, parts) is None
    assert [taken(parts[rank]) for rank in (0, 1)] == [2.0, 2.0]
    said = [average.decode_state(parts[rank].table.values["ema"]["average"]) for rank in (0, 1)]
    assert said[0] == said[1]
    assert (said[0].n, said[0].step, said[0].dropped) == (2, 2, 0)
    world.averages.close()


def test_the_table_says_what_is_in_the_slot(world: World) -> None:
    """A sample of every box that replicas must hold alike, but of buffers nothing; also when the daemon is another one."""
    for rank in (0, 1):
        world.bring(rank, 1, 4.0)
    world.wait_for(1)
    bare = bytes(replica_claims.ROW_BYTES)
    parts = {0: slot(0, after=1, digests=bare), 1: slot(1, after=1, digests=bare, apart=(0,))}
    expected = replica_claims.sample(np.full(SIZE, 4.0, np.float32).view(np.uint8), 1)
    for _ in range(2):
        assert filled(world, parts) is None
        assert np.frombuffer(parts[0].table.digests, "<u8").tolist() == [expected, 0]
        assert parts[1].table.digests == bare


def test_an_update_waits_for_the_save_before_it() -> None:
    """The next daemon finds both sealed, and fills the save first; and again, when it died half-way."""
    world = World(start=False)
    parts = {rank: slot(rank, after=1) for rank in (0, 1)}
    world.averages.start()
    world.bring(0, 1, 1.0)
    world.bring(1, 1, 1.0)
    world.wait_for(1)
    told = threading.Event()
    with world.averages._lock:  # the daemon looks when all of this is there
        world.averages.fill(CREW, parts, lambda error: told.set())
        world.bring(0, 2, 9.0)
        world.bring(1, 2, 9.0)
    assert told.wait(180)
    world.wait_for(2)
    assert [taken(parts[rank]) for rank in (0, 1)] == [1.0, 1.0]
    assert world.values() == [5.0, 5.0]
    assert filled(world, parts) is None  # after a death: it is noted that it was done
    assert [taken(parts[rank]) for rank in (0, 1)] == [1.0, 1.0]
    world.averages.close()


def test_a_save_before_the_first_update_has_no_average(world: World) -> None:
    """Nor has one whose averages are not of the same tensors."""
    parts = {rank: slot(rank, after=0) for rank in (0, 1)}
    assert filled(world, parts) is None
    assert all("ema" not in sealed.table.groups and not sealed.table.fragments for sealed in parts.values())
    world.bring(0, 1, 1.0, layout="another")
    world.bring(1, 1, 1.0)
    world.wait_for(1)
    parts = {rank: slot(rank, after=1) for rank in (0, 1)}
    assert filled(world, parts) is None
    assert "ema" not in parts[0].table.groups


def test_ranks_that_count_differently_are_refused_by_name(world: World) -> None:
    """And so is a world of which some ranks average and others do not, and a region outside of its slot."""
    error = filled(world, {0: slot(0, after=0), 1: slot(1, after=1)})
    assert error is not None and "rank 1 had 1 updates" in error.detail
    error = filled(world, {0: slot(0, after=0), 1: slot(1, after=0, said=False)})
    assert error is not None and "rank 1 sent no update" in error.detail and "lost when a daemon ended" in error.hint
    outside = slot(0, after=0)
    outside.data = outside.data[:PAGE]
    with pytest.raises(InvalidRequest, match="outside its slot"):
        saved_average.handover(outside)


def test_a_save_that_has_ended_gets_nothing(world: World) -> None:
    """Its slots may be another save's by then. If something is put into them just now, they are free after that."""
    told: list[CheckpointError | None] = []
    parts = {rank: slot(rank, after=1) for rank in (0, 1)}
    assert not world.averages.withdraw(CREW, 1)  # nothing waits
    world.averages.fill(CREW, parts, told.append)
    assert world.averages.withdraw(CREW, 1) and not world.averages.withdraw(CREW, 1)
    world.bring(0, 1, 1.0)
    world.bring(1, 1, 1.0)
    world.wait_for(1)
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def wait_in_it(*given: Any) -> None:
        began.set()
        assert goes_on.wait(180)
        put(*given)

    put = saved_average.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_average, "put", wait_in_it)
        world.averages.fill(CREW, parts, lambda error: ended.set())
        assert began.wait(180)
        assert not world.averages.withdraw(CREW, 1) and not ended.is_set()
        goes_on.set()
        assert ended.wait(180)
    assert not told and taken(parts[1]) == 1.0


def test_ranks_that_bring_other_steps_are_no_average(world: World) -> None:
    """Two ranks with the same number, but not of the same step: it is left out for both."""
    world.bring(0, 1, 1.0)
    world.bring(1, 1, 1.0)
    world.wait_for(1)
    world.bring(0, 2, 5.0)
    world.bring(1, 2, 5.0, step=3)
    world.wait_for(2)
    assert world.values() == [1.0, 1.0]
    assert len({of.record.history for of in world.ranks}) == 1


def test_the_next_daemon_takes_the_averages_over() -> None:
    """From the keeper, with what was sealed; or from the rank, where the keeper is gone too."""
    world = World(start=False)
    world.bring(0, 1, 4.0)
    world.bring(1, 1, 4.0)
    arena = Arena(Budget(None, lambda: [Bound("memory", 2**30, 2**30)]), world.keeper)
    assert arena.recover() == []
    after = Averages(arena)
    after.recover()
    after.start()
    world.wait_for(1)
    assert world.values() == [4.0, 4.0]
    after.close()
    bare = Averages(Arena(Budget(None, lambda: [Bound("memory", 2**30, 2**30)])))
    bare.start()
    world.bring(0, 2, 8.0)
    world.bring(1, 2, 8.0)
    for of in world.ranks:
        bare.attach(of.fd, of.owner, object())
        bare.attach(of.fd, of.owner, object())
    world.wait_for(2)
    assert world.values() == [6.0, 6.0]
    with pytest.raises(InvalidRequest, match="attached an average of"):
        bare.attach(world.ranks[0].fd, SegmentOwner("other", 0, 2, 1), object())
    bare.close()


def test_memory_of_averages_counts_and_is_given_back(world: World) -> None:
    """It is the arena's, whose budget it counts in; it is freed when the ranks have gone, or a newer attempt averages."""
    room = average.geometry(4 * SIZE, PAGE, PAGE)
    assert world.arena.holders == {"r": 2 * room.segment_bytes}
    assert world.arena.has("r")
    with pytest.raises(LimitExceeded, match="for the average"):
        world.averages.reserve(SegmentOwner("r", 0, 1, 2), average.geometry(2**30, PAGE), ShareHolder("r"), object())
    for rank in (0, 1):
        world.averages.leave(world.ranks[rank].owner, world.users[rank], parted=True)
    wait_until(lambda: not world.arena.holders)
    assert world.keeper.take() == []


ROOM, ASKED = average.geometry(64 * PAGE, PAGE, PAGE), slots.geometry(8, 16 * PAGE, PAGE)


def arena_of(size: int, **more: Any) -> Arena:
    """An arena with a budget of so many bytes."""
    return Arena(Budget(size, lambda: [Bound("memory", 2**30, 2**30)]), **more)


def test_slots_leave_room_for_the_averages_of_all_ranks() -> None:
    """Slots can be fewer, and an average cannot: each rank's slots leave room for its own, and for what others expect."""
    asked = ASKED._replace(slots=4)
    size = 2 * ROOM.segment_bytes + asked.segment_bytes + asked._replace(slots=1).segment_bytes
    arena = arena_of(size)
    averages = Averages(arena)
    owners = [SegmentOwner("r", rank, 2, 1) for rank in (0, 1)]
    segments = []
    for owner in owners:
        with arena.leaving(ROOM.segment_bytes, owner, ShareHolder("r"), 2):
            segments.append(arena.reserve(asked, "r", owner))
    assert [segment.geometry.slots for segment in segments] == [4, 1] and arena.bytes == size
    for owner in owners:
        averages.reserve(owner, ROOM, ShareHolder("r"), object())
    assert arena.bytes == size
    averages.close()


def test_the_first_rank_leaves_room_for_the_averages_of_those_that_come_later() -> None:
    """Of a launch with two ranks here, one of which has not asked for anything yet."""
    arena = arena_of(2 * ROOM.segment_bytes + ASKED._replace(slots=4).segment_bytes)
    owner = SegmentOwner("r", 1, 2, 1)
    with arena.leaving(ROOM.segment_bytes, owner, ShareHolder("r"), 2):
        assert arena.reserve(ASKED, "r", owner).geometry.slots == 4


def test_room_stays_left_while_the_old_slots_of_a_rank_go() -> None:
    """A rank that reserves larger slots has none in between, and still expects its average."""
    arena = arena_of(ROOM.segment_bytes + ASKED._replace(slots=4).segment_bytes)
    owner = SegmentOwner("r", 0, 1, 1)
    before = arena.reserve(ASKED._replace(slots=1), "r", owner)
    with arena.leaving(ROOM.segment_bytes, owner, ShareHolder("r")):
        arena.drop(before)
        assert arena.reserve(ASKED, "r", owner).geometry.slots == 4


def test_what_is_left_for_an_average_counts_for_no_other_and_not_against_it() -> None:
    """Its rank reserves slots at the moment at which the average is asked for: there is room for both."""
    size = ROOM.segment_bytes + ASKED._replace(slots=4).segment_bytes
    owner, other = SegmentOwner("r", 0, 1, 1), SegmentOwner("other", 0, 1, 1)
    held: list[ArenaSegment] = []

    def make_room() -> None:
        while held:
            arena.drop(held.pop())
            with arena.leaving(ROOM.segment_bytes, owner, ShareHolder("r")):
                reserved.append(arena.reserve(ASKED, "r", owner))

    reserved: list[ArenaSegment] = []
    arena = arena_of(size, make_room=make_room)
    averages = Averages(arena)
    held.append(arena.reserve(ASKED._replace(slots=7), "other", other))
    averages.reserve(owner, ROOM, ShareHolder("r"), object())
    assert [segment.geometry.slots for segment in reserved] == [4] and arena.bytes == size
    averages.close()


def test_room_is_left_only_for_ranks_that_have_slots() -> None:
    """Neither a rank that was refused nor one that has gone keeps others from the memory."""
    asked = ASKED._replace(slots=1)
    arena = arena_of(ROOM.segment_bytes + asked.segment_bytes)
    owner, other = SegmentOwner("r", 0, 1, 1), SegmentOwner("other", 0, 1, 1)
    with pytest.raises(LimitExceeded), arena.leaving(2 * ROOM.segment_bytes, owner, ShareHolder("r")):
        arena.reserve(asked, "r", owner)
    assert arena.bytes == 0
    with arena.leaving(ROOM.segment_bytes, owner, ShareHolder("r")):
        segment = arena.reserve(asked, "r", owner)
    with pytest.raises(LimitExceeded):
        arena.reserve(asked, "other", other)
    arena.drop(segment)
    assert arena.bytes == 0 and arena.reserve(asked, "other", other).geometry.slots == 1


def test_a_segment_of_slots_is_no_average() -> None:
    """A descriptor is believed by what stands in it."""
    made = slots.geometry(1, PAGE, PAGE)
    segment = ArenaSegment.make(memfd("slots", made.segment_bytes), made, SegmentOwner("r", 0, 1, 1))
    with pytest.raises(InvalidRequest, match="not an average"):
        AverageSegment.adopt(segment.fd, "average-x")
