"""Routes: summaries of runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.columns import RUN_SORTS
from holdfast_formats.rest.measurements import RunSummary
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Wired
from holdfast_service.control.insight.run_orders import WantedRuns


def wanted_runs(
    prefix: Annotated[str, Query(max_length=128, description="only runs whose names start with this")] = "",
    q: Annotated[str, Query(max_length=128, description="only runs whose names have every one of these words")] = "",
    sort: Annotated[
        str,
        Query(
            max_length=256,
            description=f"sort by {', '.join(RUN_SORTS)}, or `metric:NAME`, each with a minus for the largest first; or by "
            "`attention`",
        ),
    ] = "name",
    failed: Annotated[bool, Query(description="with runs that failed to start, to which nothing was ever saved")] = True,
) -> WantedRuns:
    return WantedRuns.parse(prefix, q, sort, failed)


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
