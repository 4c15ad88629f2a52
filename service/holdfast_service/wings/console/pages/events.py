"""Events: a page of the newest ones, which a script continues as new ones happen."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_formats.rest import lists
from holdfast_formats.rest.operations import EVENTS, Event
from holdfast_service.wings.console.rendering import link, page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, listed

router = page_router()

EVENTS_SHOWN = 50
UNFOLDED = 3  # events of a save
EVENTS_COUNTED = LIMIT_MAX
Text = Annotated[str, Query(max_length=200)]


Order = Literal["save", "time", "kind"]
_WORST = ("error", "warning", "info")


class EventGroup(NamedTuple):
    """The events of one save, or of one run apart from its saves; newest first."""

    run: str | None
    step: int | None
    level: str
    events: list[Event]


def grouped(events: list[Event]) -> list[EventGroup]:
    """The events of each save together: first what has errors, then warnings, and the newest first among equals."""
    by_place: dict[tuple[str | None, int | None], list[Event]] = {}
    for event in events:
        by_place.setdefault((event.run, event.step), []).append(event)
    groups = [EventGroup(*key, min((e.level for e in these), key=_WORST.index), these) for key, these in by_place.items()]
    return sorted(groups, key=lambda group: (_WORST.index(group.level), -group.events[0].id))


class KindGroup(NamedTuple):
    """The events of one kind; newest first."""

    kind: str
    level: str
    events: list[Event]


def by_kind(events: list[Event]) -> list[KindGroup]:
    """The most frequent kinds first."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        groups.setdefault(event.kind, []).append(event)
    made = [KindGroup(kind, min((e.level for e in these), key=_WORST.index), these) for kind, these in groups.items()]
    return sorted(made, key=lambda group: -len(group.events))


def _asked(run: Text = "", kind: Text = "", level: Text = "", order: Order = "save") -> dict[str, str]:
    return {"run": run, "kind": kind, "level": level, "order": order}


Wanted = Annotated[dict[str, str], Depends(_asked)]


@router.get("/events")
async def show_events(request: Request, api: Asked, asked: Wanted, cursor: str | None = None) -> Response:
    """Show events, grouped by save, as they happened, or counted by kind. The API filters by `run` and `kind`; `level` hides
    others of a page.
    """
    run, kind, level, order = asked["run"], asked["kind"], asked["level"], asked["order"]
    limit = EVENTS_COUNTED if order == "kind" else EVENTS_SHOWN
    found = await listed(api, Event, lists.EVENTS, cursor, limit, run=run, kind=kind)
    events = [event for event in found["listed"] if level in ("", event.level)]
    return page(
        request,
        "events.html",
        events=events,
        groups=grouped(events) if order == "save" else None,
        unfolded=UNFOLDED,
        counted=by_kind(events) if order == "kind" else None,
        newest=found["listed"][0].id if found["listed"] else 0,
        kinds=EVENTS,
        stream=link("/v1/events", run=run, kind=kind),
        **{**found, "asked": asked},
    )
