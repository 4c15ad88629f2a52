"""Jobs: work that outlasts a request, stored in the catalog, so that it outlasts the service as well.

Any node that can run a job's kind may claim it; `tries` counts its starts, and only the last one may report. A node that
starts requeues the jobs that it was running when it ended. A job of another node is requeued once that node, as the boot
that has claimed it, is no member of the cluster any more, by the database's time; without a cluster, once this daemon has
seen no new sign of life for `LOST_S`. Clocks of different machines are never compared.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, false, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.rest.operations import Job, JobKind, JobState
from holdfast_service.control.catalog.evictions import evictions
from holdfast_service.control.catalog.pages import INTEGER_MAX, bounded, decode_cursor, integer, page
from holdfast_service.control.database.cluster_schema import NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import JobRow
from holdfast_service.control.nodes import ONE_NODE, Nodes

TRIES_MAX = 3
LOST_S = 300.0
QUEUED_MAX = 10_000
KEPT_MAX = 10_000  # jobs that have ended; of more, the oldest go of those runs that have the most
TRIM_EVERY = 500
ARGUMENTS_BYTES_MAX = 65_536
GOES_ON = ("queued", "running")

Problem = dict[str, Any]


def content_key(request: JobRequest) -> str:
    """The identity of a request: SHA-256 of its canonical JSON. `LimitExceeded` for one that is too long."""
    encoded = json.dumps(request.model_dump(), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    if len(encoded) > ARGUMENTS_BYTES_MAX:
        raise LimitExceeded(f"a job's request has at most {ARGUMENTS_BYTES_MAX} bytes, not {len(encoded)}")
    return hashlib.sha256(encoded).hexdigest()


def _forget_old(session: Session) -> None:
    ended = JobRow.state.not_in(GOES_ON)
    asked = select(JobRow.run, func.count()).where(ended).group_by(JobRow.run)
    counts = {run: int(count) for run, count in session.execute(asked)}
    for run, count in evictions(counts, sum(counts.values()) - KEPT_MAX).items():
        theirs = (ended, JobRow.run == run)
        last = session.scalar(select(JobRow.id).where(*theirs).order_by(JobRow.id).offset(count - 1).limit(1))
        if last is not None:
            session.execute(delete(JobRow).where(*theirs, JobRow.id <= last))


class Jobs:
    """The jobs of one catalog, as one node sees them. Thread-safe."""

    def __init__(
        self,
        database: Database,
        node: str,
        now: Callable[[], str],
        nodes: Nodes = ONE_NODE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Daemons of all `nodes` take the same jobs."""
        self._database, self._node, self._now, self._nodes = database, node, now, nodes
        self._clock = clock
        self._signs: dict[_Sign, float] = {}  # of jobs of other nodes, and since when they are the last

    def submit(self, request: JobRequest) -> tuple[Job, bool]:
        """The job for this request, and whether it is new: an equal one that is queued or running is reused."""
        key = content_key(request)
        while True:
            try:
                with self._database.write() as session:
                    if (known := _going_on(session, key)) is not None:
                        return _job(known), False
                    self._make_room(session)
                    job_row = JobRow(
                        kind=request.kind,
                        run=request.run,
                        step=request.step,
                        request=request.model_dump()["arguments"],
                        key=key,
                        state="queued",
                        cancel=False,
                        done_bytes=0,
                        total_bytes=0,
                        node=self._node,
                        tries=0,
                        created=self._now(),
                    )
                    session.add(job_row)
                    self._flush(session)
                    if job_row.id % TRIM_EVERY == 0:
                        _forget_old(session)
                    return _job(job_row), True
            except _Faster:
                continue

    def page(
        self,
        cursor: str | None,
        limit: int,
        kind: JobKind | None = None,
        state: JobState | None = None,
        run: str | None = None,
    ) -> bodies.Page[Job]:
        """A page of jobs, newest first, of one kind, in one state, of one run if given."""
        before = decode_cursor("job", cursor)
        wanted = select(JobRow).order_by(JobRow.id.desc()).limit(bounded(limit) + 1)
        if before is not None:
            wanted = wanted.where(JobRow.id < integer(before))
        for column, value in ((JobRow.kind, kind), (JobRow.state, state), (JobRow.run, run)):
            if value is not None:
                wanted = wanted.where(column == value)
        with self._database.read() as session:
            jobs = [_job(row) for row in session.scalars(wanted)]
        return page("job", jobs, limit, lambda job: job.id)

    def get(self, job_id: int) -> Job:
        with self._database.read() as session:
            return _job(_existing(session, job_id))

    def cancel(self, job_id: int) -> Job:
        """Cancel a job: a queued one ends at once, the runner of a running one is asked to stop, an ended one stays."""
        with self._database.write() as session:
            row = _existing(session, job_id, lock=True)
            row.request_cancel(self._now())
            return _job(row)

    def waiting(self, kinds: Collection[str]) -> bool:
        """Whether `claim` might find a job; only reads, so it does not block."""
        wanted = (JobRow.state == "queued", JobRow.kind.in_(kinds))
        with self._database.read() as session:
            return session.scalar(select(JobRow.id).where(*wanted).limit(1)) is not None

    def claim(self, kinds: Collection[str]) -> Job | None:
        """Claim the oldest queued job of these kinds for this node; None when there is none."""
        with self._database.write() as session:
            wanted = (JobRow.state == "queued", JobRow.kind.in_(kinds))
            oldest = select(JobRow).where(*wanted).order_by(JobRow.id).limit(1).with_for_update(skip_locked=True)
            row = session.scalar(oldest)
            if row is None:
                return None
            row.start(self._node, self._nodes.boot, self._now())
            return _job(row)

    def progress(self, claimed: Job, done_bytes: int | None = None, total_bytes: int = 0) -> bool:
        """Renew a claimed job, with its progress. True when it must stop: cancelled, or claimed by another runner."""
        with self._database.write() as session:
            row = self._claimed(session, claimed)
            if row is None:
                return True
            row.renew(self._now())
            if done_bytes is not None:
                row.count(done_bytes, total_bytes)
            return row.cancel

    def finish(
        self,
        claimed: Job,
        state: Literal["done", "failed", "cancelled"],
        result: dict[str, Any] | None = None,
        problem: Problem | None = None,
        reported: tuple[int, int] = (0, 0),
    ) -> Job | None:
        """End a claimed job, so many bytes of so many done; None, and no change, when another runner has claimed it."""
        with self._database.write() as session:
            row = self._claimed(session, claimed)
            if row is None:
                return None
            row.end(state, self._now(), result, problem)
            done, total = reported
            row.count(total if state == "done" else done, total)
            return _job(row)

    def release(self, claimed: Job) -> None:
        """Requeue a claimed job because this node is closing. That start does not count."""
        with self._database.write() as session:
            row = self._claimed(session, claimed)
            if row is not None:
                row.requeue(uncounted=True)

    def recover(self) -> list[Job]:
        """At the start: requeue what this node was running when it ended; returns the jobs that end instead.

        Those were to be cancelled, or have been started `TRIES_MAX` times.
        """
        with self._database.write() as session:
            return self._put_back(session, JobRow.node == self._node)

    def recover_lost(self) -> list[Job]:
        """As `recover`, for jobs of nodes that are gone."""
        lost = self._is_silent() if self._nodes.alone else _is_gone()
        with self._database.read() as session:
            if session.scalar(select(JobRow.id).where(JobRow.state == "running", lost).limit(1)) is None:
                return []
        with self._database.write() as session:
            return self._put_back(session, lost)

    def _put_back(self, session: Session, which: ColumnElement[bool]) -> list[Job]:
        ended: list[Job] = []
        running = select(JobRow).where(JobRow.state == "running", which).with_for_update(skip_locked=True)
        for row in session.scalars(running).all():
            if not row.cancel and row.tries < TRIES_MAX:
                row.requeue()
                continue
            if row.cancel:
                row.end("cancelled", self._now())
            else:
                row.end("failed", self._now(), problem=_given_up(row).problem())
            ended.append(_job(row))
        return ended

    def _claimed(self, session: Session, claimed: Job) -> JobRow | None:
        row = session.get(JobRow, claimed.id, with_for_update=True)
        known = row is not None and (row.state, row.node, row.tries) == ("running", self._node, claimed.tries)
        return row if known else None

    def _make_room(self, session: Session) -> None:
        queued = session.scalar(select(func.count()).select_from(JobRow).where(JobRow.state == "queued")) or 0
        if queued >= QUEUED_MAX:
            raise LimitExceeded(f"{queued} jobs are already waiting", hint="wait for some of them, or cancel them")

    def _flush(self, session: Session) -> None:
        try:
            session.flush()
        except IntegrityError as error:
            raise _Faster from error

    def _is_silent(self) -> ColumnElement[bool]:
        """Jobs of other nodes without a new sign of life for long, in time that this daemon has measured."""
        running = select(JobRow.id, JobRow.tries, JobRow.seen).where(JobRow.state == "running", JobRow.node != self._node)
        with self._database.read() as session:
            signs = [_Sign(*row) for row in session.execute(running)]
        now = self._clock()
        self._signs = {sign: self._signs.get(sign, now) for sign in signs}
        lost = [sign for sign, since in self._signs.items() if now - since >= LOST_S]
        return or_(false(), *(and_(JobRow.id == one.id, JobRow.tries == one.tries, JobRow.seen == one.seen) for one in lost))


class _Sign(NamedTuple):
    id: int
    tries: int
    seen: str | None


def _is_gone() -> ColumnElement[bool]:
    same = or_(JobRow.boot.is_(None), NodeRow.boot == JobRow.boot)
    return ~exists().where(NodeRow.name == JobRow.node, same, NodeRow.until > func.clock_timestamp())


class _Faster(Exception):
    """Another node has submitted the same job in this moment."""


def _going_on(session: Session, key: str) -> JobRow | None:
    return session.scalar(select(JobRow).where(JobRow.key == key, JobRow.state.in_(GOES_ON)))


def _existing(session: Session, job_id: int, lock: bool = False) -> JobRow:
    if not 0 <= job_id <= INTEGER_MAX:
        raise InvalidRequest(f"{job_id} is not a job ID")
    row = session.get(JobRow, job_id, with_for_update=lock or None)
    if row is None:
        raise NoSuchResource(f"there is no job {job_id}", hint="list jobs with GET /v1/jobs; the oldest are not kept")
    return row


def _given_up(row: JobRow) -> CheckpointError:
    return CheckpointError(
        f"the service stopped {row.tries} times while running this job",
        hint="see the service's log for the cause, then submit the job again",
        tries=row.tries,
    )


def _job(row: JobRow) -> Job:
    columns = Job.model_fields.keys() - {"arguments"}
    return Job(**{name: getattr(row, name) for name in columns}, arguments=row.request)
