"""Opening a round: older attempts are refused until the lease, and a round that has ended is opened anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast_formats.errors import AlreadyCommitted, InvalidRequest, RoundAborted, StaleAttempt
from holdfast_service.control.save_coordinator import SaveCoordinator
from holdfast_service.daemon.saving import connected_ranks
from tests.daemon.saver_world import RUN, Rank, refused, saver_world
from tests.daemons import wait_until


def test_a_newer_attempt_that_comes_while_a_round_is_opened_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the answer and the lease a newer launch has begun: the old one is refused (I6)."""
    begin = SaveCoordinator.begin
    comes: list[Callable[[], object]] = []

    def overtaken(saves: SaveCoordinator, run: str, step: int, attempt: int, size: int, *intent: Any, **how: bool) -> int:
        found = begin(saves, run, step, attempt, size, *intent, **how)
        while comes:
            comes.pop()()
        return found

    monkeypatch.setattr(SaveCoordinator, "begin", overtaken)
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
        rounds = world.catalog.rounds.page(RUN).items
        assert sorted(found.state for found in rounds) == ["aborted", "committed"]


def test_a_round_that_a_rank_said_goodbye_before_ends_at_once() -> None:
    """It was awaited for ten minutes, and the others' `close()` with it. Who sealed before that has not left it."""
    with saver_world() as world:
        first, second = world.launch(2)
        slot = first.lease(1)
        second.save(1)
        second.who.part()
        second.leave()
        first.fill_and_seal(1, slot)
        assert first.wait(1).state == "committed"
        first.lease(2)
        ended = first.wait(2)
        assert ended.state == "aborted" and ended.problem is not None
        assert ended.problem["detail"] == "rank 1 has ended without saving step 2"
        assert first.free_slots() == 2
        assert isinstance(refused(lambda: first.fill_and_seal(2, 0)), RoundAborted)


def test_a_rank_that_went_without_a_goodbye_is_awaited_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link may only have broken. Where it is not back in time, what is begun after that ends for the others."""
    with saver_world() as world:
        first, second = world.launch(2)
        second.leave()
        slot = first.lease(1)
        world.saver.expire()
        assert first.outcomes == {}
        back = Rank(world, 1, first.attempt, 2)
        back.save(1)
        first.fill_and_seal(1, slot)
        assert first.wait(1).state == "committed"
        back.leave()
        first.lease(2)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + connected_ranks.BACK_S)
            world.saver.expire()
        assert first.wait(2).state == "aborted"
