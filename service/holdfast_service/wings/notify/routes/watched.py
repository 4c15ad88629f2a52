"""Routes: other daemons that this one watches. A caller sees only runs of its token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.notifications import WatchedDaemon, WatchedRun
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Viewer
from holdfast_service.control.catalog.pages import decode_cursor, integer, page
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.wings.notify.running import Parts
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch

router = APIRouter(prefix="/v1/watched", tags=["watched"], responses=problems.RESPONSES)


@router.get("/daemons", dependencies=needs("read"), summary="Watched daemons, and since when each has been unreachable")
def list_watched_daemons(parts: Parts, viewer: Viewer) -> bodies.Page[WatchedDaemon]:
    """A token for some runs sees the daemons that have one of them. 404 if the daemon runs without `--watch`."""
    watch = _watch(parts)
    if viewer.sees_all:
        return bodies.Page(items=watch.daemons())
    return bodies.Page(items=watch.daemons(viewer.sees))


@router.get("/runs", dependencies=needs("read"), summary="Runs of all watched daemons, those that need attention first")
def list_watched_runs(
    parts: Parts,
    viewer: Viewer,
    prefix: Annotated[str, Query(max_length=128, description="only runs whose names start with this")] = "",
    q: Annotated[str, Query(max_length=128, description="only runs whose names have every one of these words")] = "",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[WatchedRun]:
    """As each daemon said it last. What changes between two requests may be missed, or come twice."""
    after = decode_cursor("watched", cursor)
    first = 0 if after is None else integer(after) + 1
    wanted = WantedRuns.parse(prefix, q)
    listed = _watch(parts).runs(lambda run: wanted.has(run, ()) and viewer.sees(run), first, limit + 1)
    numbered = list(enumerate(listed, first))
    cut = page("watched", numbered, limit, lambda one: one[0])
    return bodies.Page(items=[run for _, run in cut.items], next=cut.next)


def _watch(parts: Parts) -> DaemonWatch:
    if parts.watched is None:
        raise NoSuchResource(
            "this daemon watches no other daemon", hint="start it with `holdfast serve --watch URL`, once for each daemon"
        )
    return parts.watched
