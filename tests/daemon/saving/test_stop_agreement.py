"""All ranks of a launch stop after one step: the one after the last that any of them has passed."""

from __future__ import annotations

from tests.daemon.saver_world import Rank, SaverWorld, saver_world


def ranks_of(world: SaverWorld, count: int) -> list[Rank]:
    return list(world.launch(count))


def test_the_step_after_the_last_one_that_any_rank_has_passed() -> None:
    """Told to all of them, again too, once every one has said how far it is."""
    with saver_world() as world:
        first, second, third = ranks_of(world, 3)
        stops = world.saver.stops
        assert stops.report(first.who, 4, None) == (None, (1, 2))
        assert stops.report(third.who, 9, None) == (None, (1,))
        assert stops.report(second.who, -1, None) == (10, ())
        assert stops.report(first.who, 4, None) == (10, ())


def test_ranks_that_have_not_said_it_are_asked() -> None:
    """No signal has reached them. They are not asked with every word of the others."""
    with saver_world() as world:
        first, second = ranks_of(world, 2)
        asked: list[int] = []
        second.who.ask_to_stop = lambda: asked.append(1)  # type: ignore[method-assign]
        for _ in range(3):
            world.saver.stops.report(first.who, 4, None)
        assert asked == [1]
        world.saver.stops.report(second.who, 4, None)
        world.saver.stops.report(first.who, 4, None)
        assert asked == [1]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """It has closed in order; what it has said before counts."""
    with saver_world() as world:
        first, second, third = ranks_of(world, 3)
        stops = world.saver.stops
        assert stops.report(third.who, 9, None) == (None, (0, 1))
        for rank in (second, third):
            rank.who.parted = True
            world.saver.gone(rank.who)
        assert stops.report(first.who, 4, None) == (10, ())


def test_the_next_daemon_hears_where_a_rank_stops() -> None:
    """It was told by the daemon before, and others wait for the same answer."""
    with saver_world() as world:
        first, second = ranks_of(world, 2)
        assert world.saver.stops.report(first.who, 4, 8) == (8, (1,))
        assert world.saver.stops.report(second.who, 6, None) == (8, ())


def test_launches_do_not_mix() -> None:
    """A launch that was told to stop ends; the one after it trains."""
    with saver_world() as world:
        (old,) = ranks_of(world, 1)
        assert world.saver.stops.report(old.who, 4, None) == (5, ())
        (new,) = ranks_of(world, 1)
        assert world.saver.stops.report(new.who, 7, None) == (8, ())
