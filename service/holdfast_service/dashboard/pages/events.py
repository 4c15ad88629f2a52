"""Events: a page of the newest ones, which a script continues as new ones happen."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import EVENTS, Event
from holdfast_service.dashboard.asking import Asked, shown
from holdfast_service.dashboard.rendering import link, page
from holdfast_service.dashboard.routing import page_router

router = page_router()

EVENTS_SHOWN = 100
Text = Annotated[str, Query(max_length=200)]


@router.get("/events")
async def show_events(
    request: Request, api: Asked, run: Text = "", kind: Text = "", level: Text = "", cursor: str | None = None
) -> Response:
    """Show events. The API filters by `run` and `kind`; `level` hides the less severe ones of a page."""
    found = await shown(api.page(Event, "/v1/events", run=run, kind=kind, cursor=cursor, limit=EVENTS_SHOWN))
    listed = found.value or bodies.Page[Event](items=[])
    return page(
        request,
        "events.html",
        found=found,
        events=[event for event in listed.items if level in ("", event.level)],
        newest=listed.items[0].id if listed.items else 0,
        next=listed.next,
        first=cursor is None,
        asked={"run": run, "kind": kind, "level": level},
        kinds=EVENTS,
        stream=link("/v1/events", run=run, kind=kind),
    )
