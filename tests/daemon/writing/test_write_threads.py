"""Threads that write a save: of low priority while it is on schedule, of higher priority once it is behind."""

from __future__ import annotations

import os
import threading

import pytest

from holdfast_service.daemon.writing.write_threads import BEHIND, NICES, WORKERS, Schedule, WriteThreads
from tests.daemons import wait_until

SIZE = 1000
NAME = "holdfast-write"


class Hands:
    """A clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def hands() -> Hands:
    return Hands()


def raised(level: int) -> int:
    """The nice value at a level in this process, which may be low itself."""
    return max(NICES[level], os.getpriority(os.PRIO_PROCESS, 0))


def at_level(threads: WriteThreads, schedule: Schedule, level: int) -> int:
    """The nice value of a thread that carries out a job once this level is reached."""
    wait_until(lambda: schedule.level == level)
    return threads.submit(0, nice).result()


def test_a_save_on_schedule_gives_way(hands: Hands) -> None:
    """From its first window to its last, as long as it is not later than `BEHIND`."""
    schedule = Schedule(SIZE, SIZE, hands)
    with WriteThreads(schedule) as threads:
        for part in range(10):
            hands.now = part / 10 + BEHIND
            assert threads.submit(SIZE // 10, nice).result() == raised(0)
        assert schedule.level == 0


def test_one_that_is_behind_is_continued_at_a_higher_priority(hands: Hands) -> None:
    """Level by level, though no thread of the first level gets to run."""
    release, begun = threading.Event(), threading.Semaphore(0)

    def stuck() -> int:
        begun.release()
        release.wait()
        return nice()

    schedule = Schedule(SIZE, SIZE, hands)
    with WriteThreads(schedule) as threads:
        held = [threads.submit(100, stuck) for _ in range(WORKERS)]
        for _ in held:
            begun.acquire()
        for level in (1, 2):
            hands.now = (level + 0.5) * BEHIND
            assert at_level(threads, schedule, level) == raised(level)
        release.set()
        assert [one.result() for one in held] == [raised(0)] * WORKERS


def test_when_a_save_rises(hands: Hands) -> None:
    """Once it is later than a twentieth of the whole time, then a tenth; from then on it counts as raised."""
    schedule = Schedule(SIZE, SIZE, hands)
    for now, written, level, raised_s in (
        (0.04, 0, 0, 0.0),
        (0.54, 500, 0, 0.0),
        (0.58, 500, 1, 0.0),
        (0.59, 500, 1, 0.01),
        (0.65, 500, 2, 0.07),
        (1.0, 1000, 2, 0.42),
    ):
        hands.now = now
        assert schedule.rises(written) is (level > 0 and raised_s in (0.0, 0.07))
        assert (schedule.level, round(schedule.raised_s, 6)) == (level, raised_s)


def test_an_error_is_the_jobs(hands: Hands) -> None:
    def fails() -> None:
        raise ValueError("x")

    with WriteThreads(Schedule(SIZE, SIZE, hands)) as threads:
        with pytest.raises(ValueError, match="x"):
            threads.submit(1, fails).result()
        assert threads.submit(1, nice).result() == raised(0)
    assert not [one for one in threading.enumerate() if one.name == NAME]


def test_what_was_not_begun_is_cancelled_at_the_end(hands: Hands) -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def stuck() -> None:
        begun.release()
        release.wait()

    with WriteThreads(Schedule(SIZE, SIZE, hands)) as threads:
        for _ in range(WORKERS):
            threads.submit(1, stuck)
        for _ in range(WORKERS):
            begun.acquire()
        left = threads.submit(1, nice)
        left.add_done_callback(lambda _: release.set())
    assert left.cancelled()


@pytest.mark.parametrize("most", [1, WORKERS, WORKERS + 1])
def test_a_save_goes_on_with_the_threads_that_there_are(hands: Hands, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """At the limit of processes of a container. None stays that the next save would lack."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name == NAME:  # an earlier test's thread may start others meanwhile
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with WriteThreads(Schedule(SIZE, SIZE, hands)) as threads:
        assert [threads.submit(1, nice).result() for _ in range(5)] == [raised(0)] * 5
    assert len(started) == most and not any(one.is_alive() for one in started)


def test_a_save_without_any_thread_fails(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="can't start"), WriteThreads(Schedule(SIZE, SIZE, hands)):
        pass
