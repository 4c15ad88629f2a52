"""Ended saves and jobs as spans, with phases from the recorded times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import func, select

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import JobRow
from holdfast_service.control.insight.round_history import Seen
from holdfast_service.observe.tracing import SpanPart, record

VERIFIED_S = 120.0  # a save's span is sent when it has been read back, or so long after its end
_JOB_ENDED = ("done", "failed", "cancelled")


class SaveSpans:
    """Collects the phases of each save until the last one is known."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: dict[int, Seen] = {}

    def hear(self, seen: Seen) -> None:
        before = self._waiting.get(seen.id)
        if before is None and not seen.first:
            return  # it was sent without this phase
        whole = seen if before is None else before._replace(new={**before.new, **seen.new})
        if whole.state == "committed" and "verify" not in whole.new:
            self._waiting[seen.id] = whole
            return
        self._waiting.pop(seen.id, None)
        _record_save(whole)

    def flush(self, all_of_them: bool = False) -> None:
        now = self._clock()
        for seen in [s for s in self._waiting.values() if all_of_them or now - s.ended > VERIFIED_S]:
            del self._waiting[seen.id]
            _record_save(seen)


class JobSpans:
    """Jobs of this node that have ended since the first look."""

    def __init__(self, database: Database, node: str) -> None:
        self._database, self._node = database, node
        self._behind: int | None = None
        self._going: set[int] = set()

    def update(self) -> None:
        with self._database.read() as session:
            if self._behind is None:
                self._behind = session.scalar(select(func.max(JobRow.id))) or 0
                going = select(JobRow.id).where(JobRow.state.in_(("queued", "running")))
                self._going = set(session.scalars(going))
            wanted = select(JobRow).where((JobRow.id > self._behind) | JobRow.id.in_(self._going)).order_by(JobRow.id)
            for job in session.scalars(wanted):
                self._behind = max(self._behind, job.id)
                if job.state not in _JOB_ENDED:
                    self._going.add(job.id)
                    continue
                self._going.discard(job.id)
                if job.node == self._node:
                    _record_job(job)


def _record_save(seen: Seen) -> None:
    about = _about(seen.run, seen.step, seen.attempt)
    parts = list(_phases(seen))
    ended = max([seen.ended, *(part.ended for part in parts)])
    whole = SpanPart(
        "holdfast.save", seen.opened, ended, {**about, "holdfast.world": seen.world, "holdfast.state": seen.state}
    )
    if stall := seen.new.get("stall"):
        whole = whole._replace(attributes={**whole.attributes, "holdfast.stall_s": stall})
    record(whole, [part._replace(attributes=about) for part in parts], seen.code)


def _phases(seen: Seen) -> Iterator[SpanPart]:
    """Stage, queue, write and commit follow one another; fsync is a part of writing, its last one; verifying comes after."""
    at = seen.opened
    for phase in ("stage", "queue", "write", "commit"):
        if phase not in seen.new:
            continue
        yield SpanPart(f"holdfast.save.{phase}", at, at + seen.new[phase])
        at += seen.new[phase]
        if phase == "write" and "fsync" in seen.new:
            yield SpanPart("holdfast.save.fsync", max(at - seen.new["fsync"], at - seen.new["write"]), at)
    if "verify" in seen.new:
        yield SpanPart("holdfast.save.verify", max(at, seen.ended), max(at, seen.ended) + seen.new["verify"])


def _record_job(job: JobRow) -> None:
    began = seconds_of(job.started or job.created)
    about: dict[str, Any] = {"holdfast.job": job.id, "holdfast.kind": job.kind, "holdfast.state": job.state}
    about |= _about(job.run, job.step, None) | {"holdfast.bytes": job.done_bytes}
    failed = (job.problem or {}).get("code", "failed") if job.state == "failed" else None
    record(SpanPart("holdfast.job", began, max(seconds_of(job.ended or job.created), began), about), (), failed)


def _about(run: str | None, step: int | None, attempt: int | None) -> dict[str, Any]:
    return {"holdfast.run": run, "holdfast.step": step, "holdfast.attempt": attempt}
