"""Routes: summaries of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.columns import RUN_SORTS
from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.rest.runs import RunStorage
from holdfast_formats.tags import TAGS_MAX
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Wired
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.storage_by_age import storage_by_age

Prefix = Annotated[str, Query(max_length=128, description="only runs whose names start with this")]
Tags = Annotated[
    list[str] | None, Query(max_length=TAGS_MAX, description="only runs with this tag; repeat it for runs with all of them")
]
Words = Annotated[str, Query(max_length=128, description="only runs whose names have every one of these words")]


def wanted_runs(
    prefix: Prefix = "",
    q: Words = "",
    sort: Annotated[
        str,
        Query(
            max_length=256,
            description=f"sort by {', '.join(RUN_SORTS)}, or `metric:NAME`, each with a minus for the largest first; or by "
            "`attention`, or by `training`, which lists runs in training first",
        ),
    ] = "name",
    failed: Annotated[bool, Query(description="include runs that failed to start and never saved anything")] = True,
    tag: Tags = None,
) -> WantedRuns:
    return WantedRuns.parse(prefix, q, sort, failed, tag or ())


Wanted = Annotated[WantedRuns, Depends(wanted_runs)]
router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)


@router.get(
    "/summaries",
    dependencies=needs("read"),
    summary="Summaries of all runs, by name, by need for attention, or by a column",
    response_model=bodies.Page[RunSummary],
)
def list_summaries(services: Wired, wanted: Wanted, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Any order but that by name is some seconds old. By need for attention, those that train come next, then the newest
    commits.
    """
    listed = services.summaries.page(cursor, limit, wanted)
    return Response(listed.model_dump_json(), media_type="application/json")  # serialized directly: pages poll it


@router.get(
    "/runs/{run}/summary",
    dependencies=needs("read"),
    summary="Summary of a run: exposure, stall, save interval, and what needs attention",
)
def get_summary(services: Wired, run: str) -> RunSummary:
    return services.summaries.one(run)


@router.get(
    "/storage",
    dependencies=needs("read"),
    summary="Storage of each run by age of its checkpoints, largest first",
)
def list_storage(
    services: Wired, prefix: Prefix = "", q: Words = "", cursor: Cursor = None, limit: Limit = 100
) -> bodies.Page[RunStorage]:
    """Ages count from the commits."""
    database = services.control.catalog.database
    return storage_by_age(database, services.control.events.now(), prefix, q.split(), cursor, limit)
