"""Daemons: the runs of this daemon and of all watched ones, in one list, and unreachable daemons."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.rest.notifications import WatchedDaemon, WatchedRun
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, shown, to

router = page_router()

RUNS_SHOWN = 25
DAEMONS_SHOWN = 50
HERE = "this daemon"


@router.get("/daemons")
async def show_daemons(
    request: Request,
    api: Asked,
    q: Annotated[str, Query(max_length=128)] = "",
    cursor: str | None = None,
    begin: Annotated[int, Query(alias="first", ge=0)] = 0,
) -> Response:
    """A page of the watched daemons, unreachable ones first, and one of their runs. The first page begins with the runs of
    this daemon.
    """
    daemons, runs, here = await asyncio.gather(
        shown(api.page(WatchedDaemon, "/v1/watched/daemons")),
        shown(api.page(WatchedRun, "/v1/watched/runs", q=q, cursor=cursor, limit=RUNS_SHOWN)),
        shown(api.page(RunSummary, "/v1/summaries", q=q, sort="attention", limit=RUNS_SHOWN)),
    )
    listed = [] if runs.value is None else runs.value.items
    if cursor is None and here.value is not None:
        own = [WatchedRun(daemon=HERE, url=to(one.run), reachable=True, summary=one) for one in here.value.items]
        listed = sorted([*own, *listed], key=_errors, reverse=True)
    return page(
        request,
        "daemons.html",
        q=q,
        daemons=daemons,
        listed=[] if daemons.value is None else daemons.value.items,
        begin=begin,
        shown_at_once=DAEMONS_SHOWN,
        runs=listed,
        next=None if runs.value is None else runs.value.next,
        more_here=cursor is None and here.value is not None and here.value.next is not None,
        first=cursor is None,
    )


def _errors(one: WatchedRun) -> tuple[int, int]:
    levels = [item.level for item in one.summary.attention if item.acknowledged is None]
    return levels.count("error"), levels.count("warning")
