"""Opening a round in the catalog: once for all ranks that come at once, and anew once it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast_formats.errors import AlreadyCommitted, InvalidRequest, StaleAttempt
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.rounds import Openings, RoundKey
from tests.daemon.saver_world import RUN, refused, saver_world
from tests.daemons import wait_until

KEY = RoundKey("r", 7, 1)


class Catalog:
    """Counts who asks, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, int]] = []
        self.answers = threading.Event()
        self.refuses = 0  # so many of the next questions

    def begin(self, run: str, step: int, attempt: int, world: int) -> int:
        self.asked.append((run, step, attempt, world))
        number = len(self.asked)
        assert self.answers.wait(30)
        if number <= self.refuses:
            raise StaleAttempt("a newer attempt has begun")
        return number


def test_ranks_that_come_at_once_ask_the_catalog_once() -> None:
    """All of them get the one answer; another step is asked for beside it."""
    catalog = Catalog()
    openings = Openings(catalog.begin)
    with ThreadPoolExecutor(9) as threads:
        ranks = [threads.submit(openings.open, KEY, 8) for _ in range(8)]
        wait_until(lambda: catalog.asked)
        other = threads.submit(openings.open, KEY._replace(step=8), 8)
        wait_until(lambda: len(catalog.asked) == 2)
        catalog.answers.set()
        assert {rank.result() for rank in ranks} == {1} and other.result() == 2
    assert openings.open(KEY, 8) == 1
    assert catalog.asked == [(*KEY, 8), ("r", 8, 1, 8)]


def test_who_waited_for_a_refusal_asks_for_itself() -> None:
    """A refusal is the asker's own; the next one may be told something else."""
    catalog = Catalog()
    catalog.refuses = 2
    openings = Openings(catalog.begin)
    with ThreadPoolExecutor(3) as threads:
        ranks = [threads.submit(openings.open, KEY, 3) for _ in range(3)]
        catalog.answers.set()
        refused = [rank for rank in ranks if isinstance(rank.exception(), StaleAttempt)]
        assert len(refused) == 2
        assert [rank.result() for rank in ranks if rank not in refused] == [3]


def test_a_round_that_has_ended_is_opened_anew() -> None:
    """An id that was had before the end is not used after it."""
    catalog = Catalog()
    catalog.answers.set()
    openings = Openings(catalog.begin)
    first = openings.open(KEY, 1)
    assert openings.still(KEY, first, 1) == first
    openings.ended(KEY)
    second = openings.still(KEY, first, 1)
    assert (first, second) == (1, 2) and openings.still(KEY, second, 1) == 2


def test_an_end_while_it_is_being_opened_loses_nobody() -> None:
    """The end of the round before comes late: those who wait go on."""
    catalog = Catalog()
    openings = Openings(catalog.begin)
    with ThreadPoolExecutor(2) as threads:
        opener = threads.submit(openings.open, KEY, 1)
        wait_until(lambda: catalog.asked)
        waiter = threads.submit(openings.open, KEY, 1)
        openings.ended(KEY)
        catalog.answers.set()
        assert {opener.result(timeout=30), waiter.result(timeout=30)} <= {1, 2}
    assert openings.open(KEY, 1) in (1, 2)


def test_an_attempt_that_is_over_is_told_so_by_the_catalog() -> None:
    """Once a newer attempt is there nothing is answered from memory, and that attempt's own rounds are (I6)."""
    catalog = Catalog()
    catalog.answers.set()
    openings = Openings(catalog.begin)
    stale = openings.open(KEY, 1)
    openings.fence("r", 2)
    openings.fence("r", 1)
    openings.fence("another", 9)
    catalog.refuses = 3
    assert isinstance(refused(openings.open, KEY, 1), StaleAttempt)
    assert isinstance(refused(openings.still, KEY, stale, 1), StaleAttempt)
    fresh = KEY._replace(attempt=2)
    assert openings.open(fresh, 1) == openings.open(fresh, 1) == 4


def test_a_newer_attempt_that_comes_while_a_round_is_opened_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the catalog's answer and the lease a newer launch has begun: the old one is refused (I6)."""
    begin = Decisions.begin
    comes: list[Callable[[], object]] = []

    def overtaken(decisions: Decisions, run: str, step: int, attempt: int, size: int) -> int:
        found = begin(decisions, run, step, attempt, size)
        while comes:
            comes.pop()()
        return found

    monkeypatch.setattr(Decisions, "begin", overtaken)
    with saver_world() as world:
        (old,) = world.launch(1)
        comes.append(lambda: world.launch(1))
        assert isinstance(refused(old.lease, 1), StaleAttempt)
        assert not world.saver.busy and world.committed() == []


def test_a_step_that_was_lost_is_saved_in_a_round_of_its_own() -> None:
    """Each attempt to save a step has its own row: one that ended, aborted or committed, is never gone on with."""
    with saver_world() as world:
        first, second = world.launch(2)
        first.lease(1)
        second.lease(1)
        world.saver.give_up(first.who, 1, InvalidRequest("no"))
        assert second.wait(1).state == "aborted"
        first.save(1)
        second.save(1)
        wait_until(lambda: second.wait(1).state == "committed")
        assert world.committed() == [1]
        assert isinstance(refused(first.lease, 1), AlreadyCommitted)
        rounds = world.catalog.rounds(RUN).items
        assert sorted(found.state for found in rounds) == ["aborted", "committed"]
