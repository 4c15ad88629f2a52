"""Threads that take jobs one after the other and call their kind's handler.

A handler may be started again for a job that was interrupted, so it must be idempotent.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InvalidRequest
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.rest.operations import Job, Level
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.jobs.catalog import Jobs
from holdfast_service.control.jobs.named_runs import other_runs

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.3
ALIVE_EVERY_S = 5.0
END_AGAIN_S = 5.0  # after which a job's end is recorded again where the catalog did not take it
LOOK_EVERY_S = 2.0  # for jobs that other nodes were given
CLOSE_WAIT_S = 5.0


class Cancelled(Exception):
    """Raised in a handler that must stop: its job was cancelled, or the service is closing."""


class Interrupted(Cancelled):
    """Raised in a handler whose service is closing: its job continues at the next start unless it was cancelled too."""


class Progress:
    """The progress of a job. `report` is cheap: it writes to the catalog a few times a second."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs, self._job = jobs, job
        self._written = 0.0
        self.reported = (0, 0)
        self.stopped = threading.Event()
        self.closing = False

    def close(self) -> None:
        """Interrupt the handler, whose service is closing."""
        self.closing = True
        self.stopped.set()

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Report so many of how many bytes as done; `Cancelled` once the job must stop."""
        self.reported = (done_bytes, total_bytes)
        now = time.monotonic()
        if not self.stopped.is_set() and now - self._written >= REPORT_EVERY_S:
            self._written = now
            self._tell(done_bytes, total_bytes)
        if self.stopped.is_set():
            raise Interrupted if self.closing else Cancelled

    def alive(self) -> None:
        """A sign of life of a job without progress to report."""
        self._tell(None, 0)

    def _tell(self, done_bytes: int | None, total_bytes: int) -> None:
        try:
            if self._jobs.progress(self._job, done_bytes, total_bytes):
                self.stopped.set()
        except CheckpointError as error:  # the work continues while the catalog is away
            log.warning("cannot record the progress of job %d: %s", self._job.id, error.detail)


Handler = Callable[[Job, Progress], dict[str, Any]]
Check = Callable[[Any], None]  # of a request of the kind


class JobKind(NamedTuple):
    """How jobs of a kind are done. `check` refuses by a named error, before anything is stored, what the handler could
    only fail at.
    """

    handler: Handler
    check: Check = lambda request: None

    @classmethod
    def later(cls, made: Callable[[], JobKind]) -> JobKind:
        """The kind that `made` returns, called for each job: a daemon starts without the modules that it imports."""
        return cls(lambda job, progress: made().handler(job, progress), lambda request: made().check(request))


class JobRunner:
    """Runs jobs of some kinds, by name. Thread-safe. `begin` is called first in each of its threads."""

    def __init__(
        self,
        jobs: Jobs,
        events: Events,
        kinds: Mapping[str, JobKind],
        workers: int = 1,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.jobs = jobs
        self._events, self._begin = events, begin
        self._kinds = kinds
        self._running: dict[int, Progress] = {}
        self._changed = threading.Condition()
        self._closing = self._recovered = False
        self._putting_back = threading.Lock()
        self._woken = 0
        self._threads = [threading.Thread(target=self._work, name="holdfast-job", daemon=True) for _ in range(workers)]
        self._threads.append(threading.Thread(target=self._keep_alive, name="holdfast-job-alive", daemon=True))

    def start(self) -> None:
        """Requeue interrupted jobs, and begin."""
        try:
            self._put_back()
        except CatalogUnavailable as away:
            log.warning("jobs wait until the catalog responds: %s", away.detail)
        for thread in self._threads:
            thread.start()

    @property
    def kinds(self) -> list[str]:
        return sorted(self._kinds)

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._running)

    def submit(self, request: JobRequest) -> tuple[Job, bool]:
        """The job for this request, and whether it is new. `InvalidRequest` for an unknown kind or a missing field."""
        registered = self._kinds.get(request.kind)
        if registered is None:
            hint = f"install the wing {request.wing!r}, which runs them" if request.wing else _one_of(self.kinds)
            raise InvalidRequest(f"this service does not run {request.kind!r} jobs", hint=hint)
        registered.check(request)
        job, new = self.jobs.submit(request)
        if new:
            self._wake()
        return job, new

    def cancel(self, job_id: int) -> Job:
        """Cancel a job; one that runs here stops at once, one on another node with its next sign of life."""
        before = self.jobs.get(job_id)
        job = self.jobs.cancel(job_id)
        if job.state == "running":
            with self._changed:
                progress = self._running.get(job_id)
            if progress is not None:
                progress.stopped.set()
        elif before.state == "queued" and job.state == "cancelled":
            self._report_end(job)
        return job

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Interrupt running jobs, which continue at the next start. Returns within about `wait_s`, whatever the
        handlers do.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for progress in self._running.values():
                progress.close()
        until = time.monotonic() + wait_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0.0))

    def _wake(self) -> None:
        with self._changed:
            self._woken += 1
            self._changed.notify_all()

    def _work(self) -> None:
        self._begin()
        while not self._closing:
            woken = self._woken
            job = self._claim()
            if job is not None:
                self._run(job)
            else:
                self._idle(woken)

    def _idle(self, woken: int) -> None:
        """Wait for a job that arrived after `_woken` had this value."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._woken > woken, LOOK_EVERY_S)

    def _put_back(self) -> None:
        with self._putting_back:
            if not self._recovered:
                for job in self.jobs.recover():
                    self._report_end(job)
                self._recovered = True

    def _claim(self) -> Job | None:
        try:
            self._put_back()
            return self.jobs.claim(self._kinds) if self.jobs.waiting(self._kinds) else None
        except CheckpointError as error:
            log.error("cannot read the queue of jobs: %s", error.detail)
        except Exception:
            log.exception("reading the queue of jobs failed")
        return None

    def _run(self, job: Job) -> None:
        progress = Progress(self.jobs, job)
        with self._changed:
            self._running[job.id] = progress
            if self._closing:
                progress.close()
        try:
            outcome = self._outcome(job, progress)
            while not self._is_recorded(job, progress, *outcome):
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, END_AGAIN_S):
                        return  # it is put back at the next start
        except Exception:
            log.exception("cannot record the end of job %d", job.id)
        finally:
            with self._changed:
                del self._running[job.id]

    def _is_recorded(self, job: Job, progress: Progress, state: _End, outcome: dict[str, Any] | None) -> bool:
        """Record how a job ended; False if the catalog is away and it must be retried."""
        try:
            self._end(job, progress, state, outcome)
        except CheckpointError as error:
            log.error("cannot record the end of job %d: %s", job.id, error.detail)
            return not error.retryable
        return True

    def _outcome(self, job: Job, progress: Progress) -> tuple[_End, dict[str, Any] | None]:
        """How the job ended, and its result or problem."""
        log.info("job %d starts: %s %s@%s", job.id, job.kind, job.run, job.step)
        try:
            progress.report(0, 0)
            return "done", self._kinds[job.kind].handler(job, progress)
        except Cancelled:
            return "cancelled", None
        except CheckpointError as error:
            log.warning("job %d failed: %s", job.id, error.detail)
            return "failed", error.problem()
        except Exception:
            reference = uuid.uuid4().hex
            log.exception("job %d failed, reference %s", job.id, reference)
            hint = "search the service's log for this reference to find the cause"
            return "failed", CheckpointError(
                f"internal error, reference {reference}", hint=hint, reference=reference
            ).problem()

    def _end(self, job: Job, progress: Progress, state: _End, outcome: dict[str, Any] | None) -> None:
        if state == "cancelled" and self._closing and not self.jobs.progress(job):
            self.jobs.release(job)
            log.info("job %d continues at the next start", job.id)
            return
        result, problem = (outcome, None) if state == "done" else (None, outcome)
        ended = self.jobs.finish(job, state, result, problem, progress.reported)
        if ended is not None:
            self._report_end(ended)

    def _report_end(self, job: Job) -> None:
        level: Level = "warning" if job.state == "failed" else "info"
        about = f" of {job.run}" + ("" if job.step is None else f"@{job.step}") if job.run else ""
        why = f": {job.problem['detail']}" if job.problem else ""
        text = f"job {job.id}, {job.kind}{about}, {_SAID[job.state]}{why}"
        run = None if other_runs(job) else job.run  # an event about several runs is only for callers that see all runs
        self._events.add(
            "job-ended",
            text,
            run,
            job.step,
            level,
            job=job.id,
            job_kind=job.kind,
            state=job.state,
            result=job.result,
            problem=job.problem,
        )

    def _keep_alive(self) -> None:
        self._begin()
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, ALIVE_EVERY_S)
                running = list(self._running.values())
            for progress in running:
                progress.alive()
            try:
                for job in self.jobs.recover_lost():
                    self._report_end(job)
            except CheckpointError as error:
                log.error("cannot read the jobs of other nodes: %s", error.detail)


_End = Literal["done", "failed", "cancelled"]
_SAID = {"done": "is done", "failed": "failed", "cancelled": "was cancelled"}


def _one_of(kinds: Collection[str]) -> str:
    return f"one of {', '.join(kinds)}" if kinds else "this service runs no jobs"
