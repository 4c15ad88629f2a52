"""Storage: how much each run holds, and of what age its checkpoints are."""

from __future__ import annotations

import asyncio
from typing import Annotated, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import lists
from holdfast_formats.rest.measurements import Overview
from holdfast_formats.rest.runs import RunStorage
from holdfast_service.wings.console.formatting import bytes_text
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, shown

router = page_router()


class BarPart(NamedTuple):
    """A part of a run's bar: checkpoints of one age; from and to as fractions of the longest bar."""

    age: int
    start: float
    width: float
    words: str


RUNS_SHOWN = 50
AGES = {"day_bytes": "last day", "week_bytes": "1–7 days", "month_bytes": "7–30 days", "older_bytes": "older"}


@router.get("/storage")
async def show_storage(
    request: Request,
    api: Asked,
    q: Annotated[str, Query(max_length=128)] = "",
    first: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """A page of the runs that hold most, and the sums over all that the search finds."""
    (runs, complete), overview = await asyncio.gather(
        api.walk(RunStorage, lists.STORAGE.path, LIMIT_MAX, q=q), shown(api.get(Overview, "/v1/overview"))
    )
    return page(
        request,
        "storage.html",
        q=q,
        free_bytes=None if overview.value is None else overview.value.free_bytes,
        ages=AGES,
        sums={name: sum(getattr(run, name) for run in runs) for name in ("bytes", *AGES)},
        checkpoints=sum(run.checkpoints for run in runs),
        shown=[(run, _bar(run, runs[0].bytes)) for run in runs[first : first + RUNS_SHOWN]],
        first=first,
        shown_at_once=RUNS_SHOWN,
        total=len(runs),
        complete=complete,
    )


def _bar(run: RunStorage, longest: int) -> list[BarPart]:
    parts, start = [], 0.0
    for age, (name, words) in enumerate(AGES.items()):
        size = getattr(run, name)
        if size:
            parts.append(BarPart(age, start, size / longest, f"{words} {bytes_text(size)}"))
            start += size / longest
    return parts
