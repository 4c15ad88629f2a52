"""Retention decides by I10, for every history there can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_service.control.retention import Kept, Policy, decide

HISTORIES = st.lists(
    st.builds(Kept, st.integers(0, 10**15), st.booleans(), st.booleans()), max_size=20, unique_by=lambda kept: kept.step
)
LIMITS = st.integers(1, 5)


def removed(checkpoints: list[Kept], keep_last: int | None) -> set[int]:
    return {decision.step for decision in decide(checkpoints, Policy(keep_last)) if not decision.keep}


def test_the_last_verified_ones_stay() -> None:
    """Of four verified checkpoints and a limit of two, the two oldest go, and every decision says why."""
    decisions = decide([Kept(step, True, False) for step in (10, 40, 20, 30)], Policy(2))
    assert [(d.step, d.keep) for d in decisions] == [(40, True), (30, True), (20, False), (10, False)]
    assert decisions[1].reason == "it is number 2 of the 2 newest verified ones that are kept"
    assert decisions[2].reason == "2 newer checkpoints are verified, 2 are kept"


def test_nothing_goes_before_its_successor_is_verified() -> None:
    """A newer checkpoint that was not read back takes no one's place."""
    history = [Kept(10, True, False), Kept(20, False, False), Kept(30, False, False)]
    assert removed(history, 1) == set()
    assert removed([*history, Kept(40, True, False)], 1) == {10, 20, 30}


def test_pinned_stays_and_counts() -> None:
    """A pinned checkpoint stays outside the window, and is one of the verified ones inside it."""
    history = [Kept(10, True, True), Kept(20, True, False), Kept(30, True, True), Kept(40, True, False)]
    assert removed(history, 2) == {20}


def test_no_limit_keeps_all() -> None:
    """Without a limit nothing goes."""
    assert removed([Kept(step, True, False) for step in range(100)], None) == set()


@pytest.mark.parametrize("keep_last", [0, -1])
def test_a_limit_below_one_is_refused(keep_last: int) -> None:
    """There is no policy that keeps nothing."""
    with pytest.raises(InvalidRequest):
        decide([], Policy(keep_last))


@given(HISTORIES, LIMITS)
def test_newest_verified_is_never_removed(history: list[Kept], keep_last: int) -> None:
    """I10, for any history: the newest verified checkpoint stays, and so does everything newer."""
    gone = removed(history, keep_last)
    verified = [kept.step for kept in history if kept.verified]
    assert all(step < max(verified) for step in gone) if verified else not gone


@given(HISTORIES, LIMITS)
def test_enough_verified_ones_are_newer(history: list[Kept], keep_last: int) -> None:
    """What goes is not pinned and has `keep_last` newer verified ones that stay; nothing else stays with that many."""
    gone = removed(history, keep_last)
    for kept in history:
        newer = [other.step for other in history if other.verified and other.step > kept.step]
        assert (kept.step in gone) == (len(newer) >= keep_last and not kept.pinned)
        if kept.step in gone:
            assert len(set(newer) - gone) >= keep_last


@given(HISTORIES, LIMITS, st.randoms())
def test_order_does_not_matter_and_one_pass_is_enough(history: list[Kept], keep_last: int, random: object) -> None:
    """Any order of the same checkpoints gives the same decisions, and what is left is left by a second pass."""
    gone = removed(history, keep_last)
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert removed(shuffled, keep_last) == gone
    assert removed([kept for kept in history if kept.step not in gone], keep_last) == set()
    assert len(decide(history, Policy(keep_last))) == len(history)
