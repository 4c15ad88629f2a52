"""Repairs for restores: those that are waited for, and those that follow behind a restore."""

from __future__ import annotations

import threading

import pytest

from holdfast_formats.errors import CorruptExtent, Damaged, DeadlineExceeded
from holdfast_service.daemon.saving import awaited_repairs
from holdfast_service.daemon.saving.awaited_repairs import AwaitedRepairs
from tests.daemons import wait_until

BAD = CorruptExtent("a flipped bit")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_repairs, "LOOK_S", 0.01)


def test_a_repair_behind_a_restore_waits_for_its_end() -> None:
    """Once, however many ranks report the damage."""
    busy, done = threading.Event(), []
    busy.set()

    def repair(run: str, step: int, error: Damaged | None) -> None:
        done.append((run, step, error))

    repairs = AwaitedRepairs(repair, busy=busy.is_set)
    for _ in range(3):
        repairs.behind("r", 5, BAD)
    assert not threading.Event().wait(0.1) and not done
    busy.clear()
    wait_until(lambda: bool(done))
    assert done == [("r", 5, BAD)]


def test_a_restore_that_needs_it_waits_no_longer_than_it_takes() -> None:
    """The rank that waits is itself restoring: the repair begins although ranks are busy."""
    going, done = threading.Event(), []

    def repair(run: str, step: int, error: Damaged | None) -> None:
        going.wait(180)
        done.append(step)

    repairs = AwaitedRepairs(repair, 0.01, busy=lambda: True, due=lambda run, step: False)
    repairs.behind("r", 5, None)
    with pytest.raises(DeadlineExceeded, match="is being copied back from a replica"):
        repairs.settle(("r", 1, 0), 5, None)
    going.set()
    wait_until(lambda: done == [5])


def test_what_retention_would_remove_is_not_copied_back() -> None:
    """But damage is repaired."""
    asked, done = [], []

    def due(run: str, step: int) -> bool:
        asked.append(step)
        return False

    repairs = AwaitedRepairs(lambda run, step, error: done.append(step), due=due)
    repairs.behind("r", 5, None)
    repairs.behind("r", 6, BAD)
    wait_until(lambda: asked == [5] and done == [6])
