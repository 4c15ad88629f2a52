"""Routes: background jobs."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import AnyJob
from holdfast_formats.rest.operations import Job, JobKind, JobState
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import check_job, needs
from holdfast_service.api.content import delivery
from holdfast_service.api.content.event_wait import listening
from holdfast_service.api.services import Cursor, Limit, Viewer, Wired
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.jobs.catalog import GOES_ON
from holdfast_service.control.jobs.named_runs import other_runs
from holdfast_service.control.jobs.runner import JobRunner

WAIT_MAX_S = 20.0

router = APIRouter(prefix="/v1", tags=["jobs"], responses=problems.RESPONSES)


def _runner(services: Wired) -> JobRunner:
    return services.runner


Runner = Annotated[JobRunner, Depends(_runner)]
JobId = Annotated[int, Path(ge=0, description="the job's `id`")]
IfNoneMatch = Annotated[str | None, Header(description="the ETag of the job as last read")]
_THERE = {"model": Job, "description": "An identical job is already queued or running; it is returned"}


def _permitted(viewer: Viewer, wanted: AnyJob) -> AnyJob:
    """Check the parsed request against the viewer's rights."""
    check_job(viewer, wanted.kind, wanted.run)
    return wanted


@router.post(
    "/jobs",
    dependencies=needs("write", "job", act="job-submitted"),
    status_code=202,
    summary="Submit a job; `Location` is its URL",
    response_model=Job,
    responses={200: _THERE},
)
def post_job(runner: Runner, wanted: Annotated[AnyJob, Depends(_permitted)]) -> Response:
    """An identical request returns the same job with 200 while it is queued or running. Impossible requests are
    refused at once.
    """
    job, new = runner.submit(wanted)
    headers = {"Location": f"/v1/jobs/{job.id}", "ETag": _tag(job)}
    return JSONResponse(job.model_dump(), 202 if new else 200, headers)


@router.get("/jobs", dependencies=needs("read"), summary="Jobs, newest first")
def list_jobs(  # noqa: PLR0913 — one a filter
    runner: Runner,
    viewer: Viewer,
    kind: Annotated[JobKind | None, Query(description="only jobs of this kind")] = None,
    state: Annotated[JobState | None, Query(description="only jobs in this state")] = None,
    run: Annotated[str | None, Query(description="only jobs of this run")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[Job]:
    page = runner.jobs.page(cursor, limit, kind, state, run)
    return page.model_copy(update={"items": [_shown(job, viewer) for job in page.items]})


@router.get(
    "/jobs/{job_id}",
    dependencies=needs("read"),
    summary="One job: its progress and result",
    response_model=Job,
    responses={304: {"description": "Not changed since `If-None-Match`"}},
)
async def get_job(
    services: Wired,
    runner: Runner,
    viewer: Viewer,
    job_id: JobId,
    wait_s: Annotated[
        float, Query(ge=0, le=WAIT_MAX_S, description="wait up to this many seconds for its end, or for a change")
    ] = 0,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """With `wait_s`, answers when the job has ended, when it differs from `If-None-Match`, or when the time is
    over.
    """
    until = time.monotonic() + wait_s
    with listening(services.control.events) as listener:
        while True:
            job = _shown(await run_in_threadpool(runner.jobs.get, job_id), viewer)
            unchanged = delivery.not_modified(if_none_match, _tag(job))
            changed = if_none_match is not None and not unchanged
            left_s = until - time.monotonic()
            if job.state not in GOES_ON or changed or left_s <= 0 or services.control.events.hung_up:
                break
            await listener.wait(left_s)
    if unchanged:
        return Response(status_code=304, headers={"ETag": _tag(job)})
    return JSONResponse(job.model_dump(), headers={"ETag": _tag(job)})


@router.delete(
    "/jobs/{job_id}",
    dependencies=needs("write", act="job-cancelled"),
    status_code=204,
    summary="Cancel a job",
    responses={202: {"model": Job, "description": "It is running and was asked to stop"}},
)
def cancel_job(runner: Runner, job_id: JobId, viewer: Viewer) -> Response:
    """204 if the job has ended, by this request or before; 202 if it was asked to stop. Finished work is kept.

    Callers that may not submit such a job may not cancel it.
    """
    known = runner.jobs.get(job_id)  # read first: for a caller that may not see its run, the job does not exist
    check_job(viewer, known.kind, known.run)
    job = runner.cancel(job_id)
    if job.state in GOES_ON:
        return JSONResponse(job.model_dump(), 202, {"Location": f"/v1/jobs/{job.id}"})
    return Response(status_code=204)


def _shown(job: Job, viewer: Principal) -> Job:
    """The job as this caller may see it: of a comparison or a merge with other runs only its existence, without access to
    those runs.
    """
    if viewer.sees_all or all(viewer.sees(run) for run in other_runs(job)):
        return job
    return job.model_copy(update={"arguments": {}, "result": None, "problem": None})


def _tag(job: Job) -> str:
    return f'"{sha256(job.model_dump_json().encode()).hexdigest()[:32]}"'
