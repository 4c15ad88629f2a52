"""A worker looks at each run that is due, once however often it was said, and ends on request."""

from __future__ import annotations

import threading

from holdfast_service.daemon.copying.run_worker import RunWorker


def test_every_due_run_is_looked_at() -> None:
    """One after the other; what is due while it waits behind another one is looked at once."""
    seen: list[str] = []
    began, going = threading.Event(), threading.Event()

    def act(run: str) -> None:
        seen.append(run)
        began.set()
        assert going.wait(30)

    worker = RunWorker("worker", act)
    worker.due("a")
    assert began.wait(30)
    for run in ("b", "c", "b"):
        worker.due(run)
    assert not worker.settle(0.01)
    going.set()
    assert worker.settle()
    assert seen == ["a", "b", "c"]
    worker.close()


def test_a_run_comes_again() -> None:
    """After the shortest of the times for which that was asked."""
    seen = threading.Semaphore(0)
    worker = RunWorker("worker", lambda run: _again(worker, seen))
    worker.due("a")
    for _ in range(3):
        assert seen.acquire(timeout=30)
    worker.close()


def _again(worker: RunWorker, seen: threading.Semaphore) -> None:
    worker.again("a", 3600.0)
    worker.again("a", 0.0)
    seen.release()


def test_nothing_begins_after_it_was_closed() -> None:
    """What is due then is left to the next start."""
    seen: list[str] = []
    worker = RunWorker("worker", seen.append)
    worker.close()
    worker.due("a")
    assert worker.is_closed and seen == []
