"""Ranks that save different steps and wait: what can never be complete ends at once, on all ranks, with the steps named."""

from __future__ import annotations

from tests.daemon.saver_world import saver_world


def test_ranks_that_close_after_different_steps_end_both() -> None:
    """Each waited for the other's part, for ten minutes."""
    with saver_world() as world:
        first, second = world.launch(2)
        first.save(4)
        second.save(5)
        world.saver.waits(first.who, None)
        assert first.outcomes == {}, "the other rank may still save step 4"
        world.saver.waits(second.who, None)
        for rank, step in ((first, 4), (second, 5)):
            ended = rank.wait(step)
            assert ended.state == "aborted" and ended.problem is not None
            assert "last saved were step 4 by rank 0, step 5 by rank 1" in ended.problem["detail"]
        assert world.committed() == []


def test_ranks_that_wait_for_the_commits_of_different_steps_end_both() -> None:
    """As after a signal that met them in different steps. Afterwards both save on."""
    with saver_world() as world:
        first, second = world.launch(2)
        first.save(4)
        second.save(5)
        world.saver.waits(first.who, 4)
        assert first.outcomes == {}
        world.saver.waits(second.who, 5)
        assert first.wait(4).state == second.wait(5).state == "aborted"
        first.save(6)
        world.saver.waits(first.who, 6)
        second.save(6)
        assert first.wait(6).state == second.wait(6).state == "committed"


def test_who_waits_for_a_save_that_goes_on_may_bring_the_next_part() -> None:
    """A rank that closes ends only what it has no part in; one that waits for what can be completed ends nothing."""
    with saver_world() as world:
        first, second = world.launch(2)
        first.save(4)
        first.lease(5)
        world.saver.waits(first.who, 4)
        assert second.outcomes == {} and first.outcomes == {}
        second.save(4)
        assert first.wait(4).state == "committed"
        world.saver.waits(second.who, None)
        assert first.wait(5).state == "aborted"
