"""Ranks that save different steps and wait: what can never be complete ends at once, on all ranks, with the steps named."""

from __future__ import annotations

from holdfast_formats.staging.joint import RankReport
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves, RankWait, held_together
from tests.daemon.saver_world import saver_world


def word(node: str, since: float, until: float, live: bool = True) -> RankReport:
    return RankReport(node, {}, since, until, live)


def test_saves_of_two_nodes_are_stuck_when_both_are_heard() -> None:
    """Each node alone takes the other's ranks for on their way."""
    a = OpenSaves(2, {4: frozenset({0})}, frozenset({RankWait(0, 4, 4, False)}))
    b = OpenSaves(2, {5: frozenset({1})}, frozenset({RankWait(1, 5, 5, False)}))
    assert a.is_waited_for and a.stuck() == b.stuck() == set()
    assert (
        a.joined([OpenSaves.from_report(b.report())]).stuck()
        == b.joined([OpenSaves.from_report(a.report())]).stuck()
        == {4, 5}
    )
    assert "step 4 lacks rank 1" in a.joined([b]).error_of(4).detail
    assert "step 4 by rank 0, step 5 by rank 1" in b.joined([a]).error_of(5).detail


def test_parts_of_a_save_that_are_at_two_nodes_count_together() -> None:
    """Rank 0 waits for step 4, which rank 1 has brought at the other node: it goes on, and may bring step 5."""
    a = OpenSaves(2, {4: frozenset({0})}, frozenset({RankWait(0, 4, 4, False)}))
    b = OpenSaves(2, {4: frozenset({1}), 5: frozenset({1})}, frozenset({RankWait(1, 5, 5, False)}))
    assert a.joined([b]).stuck() == set()


def test_only_what_held_at_the_same_time_counts() -> None:
    """What another node said before, or has only begun to say, shows nothing of now; nor what one that is gone said."""
    own = word("a", 10.0, 12.0)
    assert held_together([own, word("b", 10.5, 12.5)], "a") == [own, word("b", 10.5, 12.5)]
    assert held_together([own, word("b", 11.8, 12.5)], "a") == []
    assert held_together([own, word("b", 7.0, 10.1)], "a") == [own]
    assert held_together([own, word("b", 9.0, 12.0, live=False)], "a") == [own]
    assert held_together([word("a", 10.0, 10.1), word("b", 5.0, 12.0)], "a") == []


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
