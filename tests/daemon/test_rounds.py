"""Opening a round: older attempts are refused until the lease, and a round that has ended is opened anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast_formats.errors import AlreadyCommitted, InvalidRequest, StaleAttempt
from holdfast_service.control.decisions import Decisions
from tests.daemon.saver_world import RUN, refused, saver_world
from tests.daemons import wait_until


def test_a_newer_attempt_that_comes_while_a_round_is_opened_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the answer and the lease a newer launch has begun: the old one is refused (I6)."""
    begin = Decisions.begin
    comes: list[Callable[[], object]] = []

    def overtaken(decisions: Decisions, run: str, step: int, attempt: int, size: int, *intent: Any) -> int:
        found = begin(decisions, run, step, attempt, size, *intent)
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
