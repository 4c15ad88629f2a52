"""The scrub (I7): verifies all committed checkpoints periodically and slowly, so that damage is found while it can be
repaired, and before the bytes are needed.

It gives way to everything: it waits for saves; its priority and rate leave disk and CPU to others; and it holds no
checkpoint, so removals do not wait: one that is removed while being read was not damaged. Its progress is in the catalog, as
the time of each checkpoint's last check, so a restarted daemon continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming, timestamps
from holdfast_formats.errors import CheckpointError, DaemonGone, Damaged
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.operations import Job
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.control import Control
from holdfast_service.control.findings.checks import Fence
from holdfast_service.daemon.checking.checker import CheckEnd, Checker, told
from holdfast_service.daemon.checking.node_checks import ScrubClaims
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.writing.priority import give_way

log = logging.getLogger(__name__)

LOOK_S, LOOK_MIN_S = 60.0, 0.1  # how often it is looked whether something is due
PAUSE_S = 0.1
UNREAD = frozenset({CheckEnd.GONE, CheckEnd.FAILED, CheckEnd.REPLACED})
RETRY_S = 3600.0  # what could not be read, for another reason than damage, is left alone for so long


class CheckStopped(BaseException):
    """The daemon shuts down, or the caller cancelled the check (see its cause). Not a failed check."""


Progress = Callable[[int], None]  # gets the number of bytes read, and may raise to stop


class ScrubPlan(NamedTuple):
    """Rate and interval of scrubbing; it is off if either is None."""

    bytes_per_second: int | None
    every_s: float | None


class Rate:
    """A limit in bytes per second; `wait` sleeps in short spans, so that it notices a shutdown."""

    def __init__(self, bytes_per_second: int, sleep: Callable[[float], object]) -> None:
        self._bytes_per_second, self._sleep = bytes_per_second, sleep
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            at = max(self._free_at, now)
            self._free_at = at + size / self._bytes_per_second
        if at > now:
            self._sleep(at - now)


class Scrubbed(NamedTuple):
    """The result of a pass; `unread` are checkpoints that could not be read, or were gone."""

    checkpoints: int
    bytes: int
    damaged: tuple[str, ...]
    unread: tuple[str, ...]
    seconds: float


class Scrub:
    """A thread that first checks checkpoints that were never verified, then those that are due, the oldest first."""

    def __init__(
        self,
        checker: Checker,
        control: Control,
        saver: Saver,
        plan: ScrubPlan,
        claims: ScrubClaims | None = None,
    ) -> None:
        """With `claims`, several nodes scrub one root: each reads what no other one does."""
        self._claims = claims
        self._unchecked: set[CheckpointId] = set()  # at the last look
        self._stale: set[CheckpointId] = set()  # and at the look before
        self._checker, self._control, self._saver, self._plan = checker, control, saver, plan
        self._closing, self._wake = threading.Event(), threading.Event()
        self._found: deque[tuple[str, int]] = deque()
        self._not_before: dict[CheckpointId, float] = {}  # time.monotonic(), of what could not be read
        rate = plan.bytes_per_second
        self._rate = None if rate is None else Rate(rate, self._closing.wait)
        self._thread = threading.Thread(target=self._run, name="holdfast-scrub", daemon=True)
        self._thread.start()

    def check_soon(self, places: Iterable[tuple[str, int]]) -> None:
        """Check committed checkpoints that were never verified, first and without the scrub's rate limit."""
        self._found.extend(places)
        self._wake.set()

    @property
    def waiting(self) -> bool:
        """Whether checkpoints that `check_soon` was told of are not checked yet."""
        return bool(self._found)

    def close(self) -> None:
        """Stop, even within a checkpoint, which stays due."""
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def scrub(self, run: str | None = None, progress: Progress | None = None) -> Scrubbed:
        """Check all checkpoints, or those of a run, now and in the caller's thread, at the scrub's rate.

        Exceptions of `progress` end it, and are raised again.
        """
        places = [place for place in self._control.findings.due(utc_now()) if run in (None, place[0])]
        with _stopping():
            return self._pass(places, self.heed(progress, paced=True))

    def heed(self, progress: Progress | None, paced: bool) -> Progress:
        """The callback of readers of whole checkpoints before each read: it waits for saves, and for the rate if `paced`."""

        def heed(size: int) -> None:
            while self._saver.writing and not self._closing.is_set():
                self._closing.wait(PAUSE_S)
            if paced and self._rate is not None:
                self._rate.take(size)
            if self._closing.is_set():
                raise CheckStopped
            if progress is not None:
                try:
                    progress(size)
                except BaseException as error:
                    raise CheckStopped from error

        return heed

    def _run(self) -> None:
        give_way()
        while not self._closing.is_set():
            self._wake.clear()
            try:
                self._look()
            except CheckStopped:
                return
            except CheckpointError as error:
                log.warning("the scrub is waiting for the catalog: %s", error.detail)
            except Exception:
                log.exception("the scrub failed")
            self._wake.wait(min(LOOK_S, max(self._plan.every_s or LOOK_S, LOOK_MIN_S)))

    def _look(self) -> None:
        unpaced = self.heed(None, paced=False)
        while self._found:
            self._check(*self._found[0], unpaced)
            self._found.popleft()
        if self._claims is not None:
            unchecked = set(self._control.findings.unchecked())
            self._stale, self._unchecked = unchecked & self._unchecked, unchecked
            self._share(self._claims, self._left_unchecked, unpaced)
        if self._rate is None or self._plan.every_s is None:
            return
        if self._claims is not None:
            self._share(self._claims, self._due, self.heed(None, paced=True))
        elif due := self._due():
            self._pass(due, self.heed(None, paced=True))

    def _due(self) -> list[CheckpointId]:
        """Checkpoints not verified for long, without recent commits, which their nodes check."""
        due = self._control.findings.due(timestamps.later(utc_now(), -(self._plan.every_s or 0.0)))
        return self._free([place for place in due if place not in self._unchecked - self._stale])

    def _left_unchecked(self) -> list[CheckpointId]:
        """Checkpoints never checked, now and at the last look: their committing node may be gone."""
        return self._free([place for place in self._control.findings.unchecked() if place in self._stale])

    def _free(self, places: Sequence[CheckpointId]) -> list[CheckpointId]:
        """Those that are not being checked, and could be read."""
        now, together = time.monotonic(), self._saver.spread.going() if places else ()
        may = [place for place in places if self._not_before.get(place, now) <= now and place not in together]
        return [place for place in may if not self._saver.checks.awaits(*place)]

    def _share(self, claims: ScrubClaims, left: Callable[[], list[CheckpointId]], heed: Progress) -> None:
        """Check what is left, as long as there is something that no other node checks."""
        taken = self._taken(claims, left)
        first = next(taken, None)
        if first is not None:
            self._pass(chain([first], taken), heed, claims)

    def _taken(self, claims: ScrubClaims, left: Callable[[], list[CheckpointId]]) -> Iterator[CheckpointId]:
        """Those that this node claims, one after the other."""
        done: set[CheckpointId] = set()
        while (place := claims.take([one for one in left() if one not in done])) is not None:
            done.add(place)
            try:
                if place in left():  # else another node has done it in this moment
                    yield place
            finally:
                claims.leave(place)

    def _pass(self, places: Iterable[CheckpointId], heed: Progress, claims: ScrubClaims | None = None) -> Scrubbed:
        began, before = time.monotonic(), self._checker.counts.all()["bytes"]
        ends = [
            (f"{place.run}@{place.step}", self._check(*place, heed, claims.fence(place) if claims is not None else None))
            for place in places
        ]
        scrubbed = Scrubbed(
            checkpoints=len(ends),
            bytes=self._checker.counts.all()["bytes"] - before,
            damaged=tuple(name for name, end in ends if end is CheckEnd.DAMAGED),
            unread=tuple(name for name, end in ends if end in UNREAD),
            seconds=round(time.monotonic() - began, 3),
        )
        self._control.findings.scrubbed(scrubbed.checkpoints, scrubbed.bytes, len(scrubbed.damaged), scrubbed.seconds)
        return scrubbed

    def _check(self, run: str, step: int, heed: Progress, fence: Fence | None = None) -> CheckEnd:
        ended = told(run, step, lambda: self._checker.check(run, step, heed, hold=False, fence=fence))
        if ended in UNREAD:
            self._not_before[CheckpointId(run, step)] = time.monotonic() + RETRY_S
        else:
            self._not_before.pop(CheckpointId(run, step), None)
        return ended


class CheckJobs:
    """Checks as jobs: their arguments and progress."""

    def __init__(self, checker: Checker, scrub: Scrub, tier: Files) -> None:
        self._checker, self._scrub, self._tier = checker, scrub, tier

    def verify(self, run: str, step: int, progress: Reports) -> dict[str, Any]:
        """Verify one checkpoint, and return what was read.

        Raises the first `Damaged` that could not be repaired, once it is recorded; `NoSuchCheckpoint`, `InUse` if a save is
        about to replace the checkpoint, read errors, and what `progress` raises to stop.
        """
        directory = naming.checkpoint_path(run, step)
        try:
            total = open_checkpoint(self._tier, directory).manifest.bytes
        except Damaged:  # the check reports or repairs it
            total = 0
        with _stopping():
            check = self._checker.check(run, step, self._scrub.heed(_Sum(progress, total).add, paced=False))
        manifest = open_checkpoint(self._tier, directory).manifest
        tensors = sum(len(listed) for listed in manifest.tensors.values())
        return {**check, "files": len(manifest.files), "tensors": tensors}

    def scrub(self, job: Job, progress: Reports) -> dict[str, Any]:
        """Check all checkpoints, or those of `run`, whenever they were last checked, at the scrub's rate."""
        return self._scrub.scrub(job.run, _Sum(progress, 0).add)._asdict()


class Reports(Protocol):
    """Reports the progress of a job; raises if the job is to stop."""

    def report(self, done_bytes: int, total_bytes: int) -> None: ...


class _Sum:
    def __init__(self, progress: Reports, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress.report(min(self._done, self._total) if self._total else self._done, self._total)


@contextmanager
def _stopping() -> Iterator[None]:
    """Raise the original cause of a stopped check; `DaemonGone` if the daemon ends."""
    try:
        yield
    except CheckStopped as stopped:
        raise stopped.__cause__ or DaemonGone("the daemon is shutting down") from None
