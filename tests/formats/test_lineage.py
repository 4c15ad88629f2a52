"""lineage: which checkpoints are on the way to what is trained, compared with a history that remembers every parent."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import lineage
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.lineage import NOTHING, Lineage, Rewind


class Saved(NamedTuple):
    """A checkpoint, and those that training came by, by identity: attempt, turn and step."""

    step: int
    attempt: int
    turn: int
    rewinds: tuple[Rewind, ...] = ()
    before: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.attempt, self.turn, self.step)


# A launch: how many restores and saves it does, each restore by the number of what is there, each save by a distance.
LAUNCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=3),
    min_size=1,
    max_size=6,
)


@given(launches=LAUNCHES, gone=st.sets(st.integers(0, 40)))
def test_what_lives_is_what_the_last_save_came_by(launches: list[list[tuple[int, list[int]]]], gone: set[int]) -> None:
    """However often training goes back, to whatever line: exactly the forebears of the newest save are not abandoned."""
    there: dict[int, Saved] = {}
    count = 0
    for attempt, turns in enumerate(launches, 1):
        for turn, (choice, distances) in enumerate(turns, 1):
            source = there[sorted(there)[choice % len(there)]] if there else None
            step = source.step if source is not None else 0
            before = source.before | {source.key} if source is not None else frozenset()
            for distance in distances:
                step += distance
                restored = source.step if source is not None else None
                way = lineage.went_on(list(there.values()), (attempt, turn), restored)
                lineage.check(Lineage(restored, turn, way))
                last = Saved(step, attempt, turn, way, before)
                there[step] = last
                before |= {last.key}
                count += 1
                if count in gone and source is not None and len(there) > 2:  # retention lets something old go
                    oldest = min(s for s in there if s != source.step)
                    there = {s: c for s, c in there.items() if s != oldest or c is last}
                living = {c.step for c in there.values() if c.key in before}
                assert set(there) - lineage.abandoned(list(there.values())) == living
                assert lineage.is_on(way, last)


def test_a_launch_that_goes_on_from_the_newest_begins_no_line() -> None:
    """Where nothing newer stands, and where it is of the launch itself, nothing is left behind."""
    there = [Saved(10, 1, 0), Saved(20, 1, 0)]
    assert lineage.went_on(there, (2, 1), 20) == ()
    assert lineage.went_on(there, (2, 1), None) == ()
    assert lineage.went_on(there, (1, 0), 10) == (), "its own saves are no other line"
    assert lineage.went_on(there, (2, 1), 10) == (Rewind(2, 1, 10),)


def test_a_step_that_is_gone_is_gone_back_to_by_its_number() -> None:
    """What was restored may have been removed since: the rewinds before it are those of the living line."""
    there = [Saved(5, 1, 0), Saved(8, 2, 1, (Rewind(2, 1, 5),)), Saved(30, 2, 1, (Rewind(2, 1, 5),))]
    assert lineage.went_on(there, (3, 1), 20) == (Rewind(2, 1, 5), Rewind(3, 1, 20))
    assert lineage.went_on(there, (3, 1), 3) == (Rewind(3, 1, 3),)


def test_others_are_what_another_launch_or_turn_saved() -> None:
    """Only living steps behind the given one count."""
    there = [Saved(5, 1, 0), Saved(9, 1, 0), Saved(7, 2, 1, (Rewind(2, 1, 5),))]
    assert lineage.others(there, (3, 1), 0) == [5, 7]
    assert lineage.others(there, (2, 1), 5) == []


@pytest.mark.parametrize(
    "found",
    [
        Lineage(-1, 0, ()),
        Lineage(None, -1, ()),
        Lineage(3, 1, (Rewind(2, 1, 3), Rewind(2, 1, 4))),
        Lineage(3, 1, (Rewind(3, 1, 3), Rewind(2, 1, 4))),
        Lineage(3, 1, (Rewind(0, 0, 3),)),
        Lineage(3, 1, (Rewind(1, 1, NOTHING - 1),)),
    ],
)
def test_a_lineage_that_cannot_be(found: Lineage) -> None:
    """Rewinds come one after the other, and go to a step, or to nothing at all."""
    with pytest.raises(InvalidRequest):
        lineage.check(found)


def test_what_a_launch_has_replaced_is_its_own() -> None:
    """A save that replaces is of a turn of its own, and leaves nothing behind of what its launch saved since the restore."""
    there = [Saved(5, 1, 0), Saved(6, 2, 1), Saved(7, 2, 2)]
    assert lineage.others(there, (2, 3), 5, again=2) == [] and lineage.went_on(there, (2, 3), 5, again=2) == ()
    assert lineage.others(there, (2, 3), 5) == [6, 7], "it was restored in between"
    assert lineage.is_own(there[1], (2, 3), again=2) and not lineage.is_own(there[0], (2, 3), again=2)


def test_a_launch_that_goes_on_from_another_root_begins_a_line() -> None:
    """From its checkpoint, or beside a newer line of which nothing is here; its next saves stay on that line."""
    ours, theirs = Saved(30, 1, 0), Saved(40, 2, 1, (Rewind(2, 1, 20),))
    elsewhere = lineage.Elsewhere(frozenset({2}), theirs.rewinds)
    assert lineage.went_on([ours, theirs], (3, 1), 40, 0, elsewhere) == (Rewind(2, 1, 20), Rewind(3, 1, 40))
    assert lineage.went_on([ours], (3, 1), 30, 0, elsewhere) == (Rewind(3, 1, 30),)
    begun = (Rewind(2, 1, 20), Rewind(3, 1, 40))
    assert lineage.went_on([ours, theirs, Saved(50, 3, 1, begun)], (3, 1), 40, 0, elsewhere) == begun
    assert lineage.went_on([ours], (1, 0), None, 0, elsewhere) == ()
    assert lineage.abandoned([ours, theirs]) == {30}
