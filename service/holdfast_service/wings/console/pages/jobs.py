"""Jobs: the progress of each, and a button that stops it."""

from __future__ import annotations

from typing import Annotated, get_args

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import lists
from holdfast_formats.rest.operations import Job, JobKind, JobState
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, listed

router = page_router()

JOBS_SHOWN = 50
Text = Annotated[str, Query(max_length=128)]
GOING_ON = ("queued", "running")


@router.get("/jobs")
async def show_jobs(
    request: Request, api: Asked, state: Text = "", kind: Text = "", run: Text = "", cursor: str | None = None
) -> Response:
    """A page of jobs, the newest first."""
    jobs = await listed(api, Job, lists.JOBS, cursor, JOBS_SHOWN, state=state, kind=kind, run=run)
    return page(request, "jobs.html", kinds=get_args(JobKind), states=get_args(JobState), going_on=GOING_ON, **jobs)


@router.get("/jobs/{job_id}")
async def show_job(request: Request, api: Asked, job_id: int) -> Response:
    return page(request, "job.html", job=await api.get(Job, f"/v1/jobs/{job_id}"), going_on=GOING_ON)


@router.post("/jobs/{job_id}/cancel")
async def cancel(api: Asked, job_id: int, _: Posted) -> Response:
    await api.request("DELETE", f"/v1/jobs/{job_id}")
    return see(f"/jobs/{job_id}", "cancelled")
