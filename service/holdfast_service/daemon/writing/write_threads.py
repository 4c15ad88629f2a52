"""The threads that write the windows of a save: they give way to training while the save is on schedule, and no longer.

A save costs the same seconds of processor however slowly it is written. On a machine whose cores are all busy, threads of
low priority would get a tenth of one, and a save would take many times as long as the disk needs. So each save has a
schedule, by the speed that the disk has shown, and threads of higher priority go on with it once it is behind. A thread
cannot raise its own priority without a privilege, so there are threads for each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from holdfast_service.daemon.writing.priority import NICE, give_way, lower

WORKERS = 6  # on busy cores each waits for its turn after every window: three leave the device without work meanwhile
NICES = (NICE, 4, 0)
BEHIND = 0.05  # of the whole time: a save that is behind by more goes on at the second level, by twice as much at the third
WHOLE_MIN_S = 0.1  # what is shorter is soon over
ASSUMED_BYTES_PER_SECOND = 10**9  # of a disk that has not been measured

T = TypeVar("T")


class Schedule:
    """When which part of a save of `size` bytes should be written, and since when it is behind. `now` reads a clock."""

    def __init__(self, size: int, bytes_per_second: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._size, self._now, self._began = max(size, 1), now, now()
        self._whole_s = max(self._size / (bytes_per_second or ASSUMED_BYTES_PER_SECOND), WHOLE_MIN_S)
        self._raised: float | None = None
        self.level = 0  # of priority
        self.look_s = self._whole_s * BEHIND  # between two looks whether it is behind

    @property
    def raised_s(self) -> float:
        """For how many seconds the save has had a higher priority."""
        return 0.0 if self._raised is None else self._now() - self._raised

    def rises(self, written: int) -> bool:
        """Whether a save with so many bytes written is late enough for the next level, which is then its own."""
        due_s = self._whole_s * min(written / self._size, 1.0)
        if self._now() - self._began <= due_s + self._whole_s * BEHIND * (self.level + 1):
            return False
        self.level += 1
        self._raised = self._raised or self._now()
        return True


class _Job(NamedTuple):
    future: Future[Any]
    act: Callable[[], Any]
    size: int


class WriteThreads:
    """A context manager, at whose end all threads have ended, and what was not begun is cancelled. Safe for threads."""

    def __init__(self, schedule: Schedule) -> None:
        """All threads start from the caller's, whose priority they would keep if it were low."""
        self._schedule = schedule
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._written, self._closed = 0, False
        self._threads = [
            threading.Thread(target=self._run, args=(level,), name="holdfast-write", daemon=True)
            for level in range(len(NICES))
            for _ in range(WORKERS)
        ]

    def __enter__(self) -> WriteThreads:
        for number, thread in enumerate(self._threads):  # the lowest level first: higher ones are for saves that are late
            try:
                thread.start()
            except RuntimeError:  # the process may have no more
                if not number:
                    raise
                break
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            left, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for job in left:
            job.future.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def submit(self, size: int, act: Callable[..., T], *given: Any) -> Future[T]:
        """Call `act` in one of the threads, which writes `size` bytes of the save."""
        future: Future[T] = Future()
        with self._changed:
            self._jobs.append(_Job(future, lambda: act(*given), size))
            self._changed.notify_all()
        return future

    def _run(self, level: int) -> None:
        if level == 0:
            give_way()
        else:
            lower(NICES[level])
        while (job := self._next(level)) is not None:
            if job.future.set_running_or_notify_cancel():
                _carry_out(job)
                with self._changed:
                    self._written += job.size
            del job  # and what it holds

    def _next(self, level: int) -> _Job | None:
        """A job for a thread of this level; None once it has no more to do. Threads of the next level keep the time, since
        those of this one may not get to run.
        """
        with self._changed:
            schedule = self._schedule
            while not self._closed and level >= schedule.level:
                if level == schedule.level and self._jobs:
                    return self._jobs.popleft()
                self._changed.wait(schedule.look_s if level == schedule.level + 1 else None)
                if level == schedule.level + 1 and schedule.rises(self._written):
                    self._changed.notify_all()
            return None


def _carry_out(job: _Job) -> None:
    try:
        job.future.set_result(job.act())
    except BaseException as error:
        job.future.set_exception(error)
