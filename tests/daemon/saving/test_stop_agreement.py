"""All ranks of a launch stop after one step: the one after the last that any of them has passed."""

from __future__ import annotations

from holdfast_formats.staging.messages import PassedStep
from tests.daemon.saver_world import Rank, SaverWorld, saver_world


def ranks_of(world: SaverWorld, count: int) -> list[Rank]:
    return list(world.launch(count))


def tell(rank: Rank, passed: int, step: int | None = None) -> tuple[int | None, tuple[int, ...]]:
    """How far this rank is; what it is answered."""
    answer = rank.world.saver.stops.report(rank.who, PassedStep(passed=passed, step=step))
    return answer.step, answer.missing


def test_the_step_after_the_last_one_that_any_rank_has_passed() -> None:
    """Told to all of them, again too, once every one has said how far it is."""
    with saver_world() as world:
        first, second, third = ranks_of(world, 3)
        assert tell(first, 4) == (None, (1, 2))
        assert tell(third, 9) == (None, (1,))
        assert tell(second, -1) == (10, ())
        assert tell(first, 4) == (10, ())


def test_ranks_that_have_not_said_it_are_asked() -> None:
    """No signal has reached them. They are not asked with every word of the others."""
    with saver_world() as world:
        first, second = ranks_of(world, 2)
        asked: list[int] = []
        second.who.ask_to_stop = lambda: asked.append(1)  # type: ignore[method-assign]
        for _ in range(3):
            tell(first, 4)
        assert asked == [1]
        tell(second, 4)
        tell(first, 4)
        assert asked == [1]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """It has closed in order; what it has said before counts."""
    with saver_world() as world:
        first, second, third = ranks_of(world, 3)
        assert tell(third, 9) == (None, (0, 1))
        for rank in (second, third):
            rank.who.part()
            world.saver.gone(rank.who)
        assert tell(first, 4) == (10, ())


def test_the_next_daemon_hears_where_a_rank_stops() -> None:
    """It was told by the daemon before, and others wait for the same answer."""
    with saver_world() as world:
        first, second = ranks_of(world, 2)
        assert tell(first, 4, 8) == (8, (1,))
        assert tell(second, 6) == (8, ())


def test_launches_do_not_mix() -> None:
    """A launch that was told to stop ends; the one after it trains."""
    with saver_world() as world:
        (old,) = ranks_of(world, 1)
        assert tell(old, 4) == (5, ())
        (new,) = ranks_of(world, 1)
        assert tell(new, 7) == (8, ())
