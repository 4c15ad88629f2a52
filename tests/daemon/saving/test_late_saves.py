"""A save that is durable only after the next one has begun is an event, once for each row of such saves."""

from __future__ import annotations

from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_service.storage import MemoryTier
from tests.daemon.saver_world import RUN, GatedTier, Rank, SaverWorld, saver_world


def overlap(tier: GatedTier, rank: Rank, step: int, intent: Intent = NO_INTENT) -> None:
    """Save this step, and begin the next one before this one is durable."""
    tier.gate.swing(shut=True)
    rank.save(step, intent=intent)
    tier.gate.wait_for(step)
    rank.save(step + 1, intent=intent)
    tier.gate.swing(shut=False)
    assert {rank.wait(step).state, rank.wait(step + 1).state} == {"committed"}


def late(world: SaverWorld) -> list[int | None]:
    """The steps of the events, once the catalog has them all."""
    world.control.record_queue.flush(60)
    return [event.step for event in world.control.events.after(0, 100, RUN, "save-late")]


def test_saves_on_time_are_no_event() -> None:
    with saver_world() as world:
        (rank,) = world.launch(1)
        for step in (1, 2, 3):
            rank.save(step)
            assert rank.wait(step).state == "committed"
        assert late(world) == []


def test_the_first_late_save_of_several_is_an_event() -> None:
    """The second overlap follows the save on time that ended the first: two events; a row of late saves is one."""
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:
        (rank,) = world.launch(1, slots=3)
        overlap(tier, rank, 1)
        overlap(tier, rank, 3)
        assert late(world) == [1, 3]
        tier.gate.swing(shut=True)
        for step in (5, 6, 7):
            rank.save(step)
        tier.gate.swing(shut=False)
        for step in (5, 6, 7):
            assert rank.wait(step).state == "committed"
        assert late(world) == [1, 3, 5]


def test_another_launch_is_told_again() -> None:
    tier = GatedTier(MemoryTier())
    with saver_world(tier) as world:
        (rank,) = world.launch(1, slots=3)
        tier.gate.swing(shut=True)
        rank.save(1)
        tier.gate.wait_for(1)
        rank.lease(2)  # and never sealed
        tier.gate.swing(shut=False)
        assert rank.wait(1).state == "committed"
        rank.leave()
        (rank,) = world.launch(1, slots=3)
        overlap(tier, rank, 3, Intent(restored=1))
        assert late(world) == [1, 3]
