"""Attempts (I6): launches are numbered durably, older ones refused, answers stand; with no catalog, and after a loss."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, InvalidRequest, StaleAttempt
from holdfast_formats.lineage import Elsewhere, Rewind
from holdfast_service.control.catalog.attempts import Attempts, RunAttempts
from holdfast_service.storage import MemoryTier


def nothing() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def tier() -> MemoryTier:
    made = MemoryTier()
    Attempts(made).merge({})
    return made


def test_launches_are_numbered_once(tier: MemoryTier) -> None:
    """The same launch has the same number, also after a newer one and for the next daemon; a new launch has the next."""
    attempts = Attempts(tier)
    given = [attempts.declare("run", launch, nothing) for launch in ("a", "a", "b", "a", "c")]
    assert given == [(1, True), (1, False), (2, True), (1, False), (3, True)]
    assert attempts.declare("other", "a", nothing) == (1, True)
    again = Attempts(tier)
    assert again.complete and again.newest("run") == 3 and again.of("run", "b") == 2
    assert again.declare("run", "a", nothing) == (1, False)


def test_many_threads_declare_at_once(tier: MemoryTier) -> None:
    """Eight ranks each of four launches get four numbers."""
    attempts = Attempts(tier)
    with ThreadPoolExecutor(8) as pool:
        given = set(pool.map(lambda n: (n % 4, attempts.declare("run", f"l{n % 4}", nothing)[0]), range(32)))
    assert {attempt for _, attempt in given} == {1, 2, 3, 4} and len(given) == 4


def test_older_attempts_are_refused(tier: MemoryTier) -> None:
    """I6: once a newer launch is declared, or a slot of a newer attempt is found, older ones are over."""
    attempts = Attempts(tier)
    attempts.declare("run", "a", nothing)
    attempts.refuse_older("run", 1)
    attempts.declare("run", "b", nothing)
    for known in (attempts, Attempts(tier)):
        with pytest.raises(StaleAttempt) as caught:
            known.refuse_older("run", 1)
        assert caught.value.members["newest"] == 2
        known.refuse_older("run", 2)
    attempts.saw("run", 7)
    assert Attempts(tier).newest("run") == 7


def test_what_was_complete_is_owed(tier: MemoryTier) -> None:
    """What an older attempt had sealed when the newer one was declared is known to the next daemon, and nothing else is."""
    attempts = Attempts(tier)
    attempts.declare("run", "a", nothing)
    attempts.declare("run", "b", lambda: [(5, 1)])
    again = Attempts(tier)
    assert again.owes("run", 5, 1) and not again.owes("run", 6, 1) and not again.owes("other", 5, 1)


def test_answers_stand(tier: MemoryTier) -> None:
    """The first answer to a question is the answer, None included, for the next daemon as well."""
    attempts = Attempts(tier)
    attempts.declare("run", "a", nothing)
    assert attempts.asked("run", 1, 0) == (False, None)
    assert (attempts.answer("run", 1, 0, None), attempts.answer("run", 1, 0, 500)) == (None, None)
    assert (attempts.answer("run", 1, 1, 500), attempts.answer("run", 1, 1, 600)) == (500, 500)
    assert Attempts(tier).asked("run", 1, 0) == (True, None) and Attempts(tier).asked("run", 1, 1) == (True, 500)


def test_without_its_file_nothing_is_numbered_before_the_catalog_was_asked() -> None:
    """Of an older version, or after a loss: a number could be given out twice; what the catalog knows is taken over."""
    tier = MemoryTier()
    tier.replace(naming.ATTEMPTS, b"{not json")
    attempts = Attempts(tier)
    assert not attempts.complete
    with pytest.raises(CatalogUnavailable):
        attempts.declare("run", "new", nothing)
    attempts.merge({"run": RunAttempts(attempt=4, launches={"old": 3}, answers={"4.0": 10})})
    assert attempts.declare("run", "old", nothing) == (3, False) and attempts.declare("run", "new", nothing) == (5, True)
    assert Attempts(tier).asked("run", 4, 0) == (True, 10)


@pytest.mark.parametrize("launch", ["", "a\0b", "x" * 257, "a\ud800", "a\nb"])
def test_launches_are_named_by_text_that_a_person_could_read(tier: MemoryTier, launch: str) -> None:
    """And a refused one declares nothing."""
    with pytest.raises(InvalidRequest):
        Attempts(tier).declare("run", launch, nothing)
    assert Attempts(tier).newest("run") == 0


def test_attempts_of_other_roots_are_exceeded(tier: MemoryTier) -> None:
    """A launch that is at work goes on, and later ones have greater numbers, also after a restart; the newest way stays."""
    attempts = Attempts(tier)
    assert attempts.declare("run", "a", nothing) == (1, True)
    assert attempts.saw_elsewhere("run", {2, 5}, (Rewind(5, 1, 20),))
    assert not attempts.saw_elsewhere("run", {2}, (Rewind(2, 1, 10),))
    attempts.refuse_older("run", 1)
    again = Attempts(tier)
    assert again.elsewhere("run") == Elsewhere(frozenset({2, 5}), (Rewind(5, 1, 20),))
    assert again.declare("run", "b", nothing) == (6, True)
    assert [again.is_own("run", attempt) for attempt in (1, 2, 5, 6)] == [True, False, False, True]
