"""The overview: every run at a glance, and above them the runs that need a person."""

from __future__ import annotations

import asyncio
from typing import Annotated, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import Attention, RunSummary
from holdfast_service.dashboard.asking import Asked, ViewerApi, shown
from holdfast_service.dashboard.rendering import page
from holdfast_service.dashboard.routing import page_router

router = page_router()

RUNS_SHOWN = 50
SORTS = ("attention", "name")
Text = Annotated[str, Query(max_length=128)]
_ORDER = {"error": 0, "warning": 1}


class RunLine(NamedTuple):
    """A line of the overview. `summary` is None if this service has no summaries."""

    name: str
    newest: int | None
    checkpoints: int
    bytes: int
    attempt: int
    summary: RunSummary | None

    @property
    def level(self) -> str:
        """The most severe problem, for the mark at the beginning of the line."""
        levels = [item.level for item in self.summary.attention] if self.summary else []
        quiet = "fine" if self.summary is not None and self.summary.state == "running" else "gone"
        return "error" if "error" in levels else "warning" if levels else quiet

    @property
    def says(self) -> str:
        """The same in words, and the state of the run's ranks."""
        if self.summary is None:
            return "unknown"
        state = self.summary.state or "not training"
        return state if self.level in ("fine", "gone") else f"{self.level}, {state}"


class Call(NamedTuple):
    run: str
    item: Attention


@router.get("/")
async def show_overview(
    request: Request, api: Asked, q: Text = "", sort: Text = "attention", cursor: str | None = None
) -> Response:
    """Lines of a page of runs, those first that need a person; tiles for the whole service."""
    order = sort if sort in SORTS else "attention"
    lines, health, nodes, going_on = await asyncio.gather(
        _lines(api, q, order, cursor),
        api.get(bodies.Health, "/healthz"),
        shown(api.page(bodies.Node, "/v1/nodes")),
        shown(_under_way(api)),
    )
    return page(
        request,
        "overview.html",
        q=q,
        sort=order,
        lines=lines.items,
        next=lines.next,
        first=cursor is None,
        health=health,
        nodes=nodes.value.items if nodes.value else [],
        rounds=going_on.value or [],
        calls=_calls([line.summary for line in lines.items if line.summary]),
    )


async def _lines(api: ViewerApi, prefix: str, order: str, cursor: str | None) -> bodies.Page[RunLine]:
    asking = api.page(RunSummary, "/v1/summaries", prefix=prefix, sort=order, cursor=cursor, limit=RUNS_SHOWN)
    summed = await shown(asking)
    if summed.value is not None:
        made = [RunLine(s.run, s.newest, s.checkpoints, s.bytes, s.attempt, s) for s in summed.value.items]
        return bodies.Page(items=made, next=summed.value.next)
    if not summed.absent and summed.error is not None:
        raise summed.error
    runs = await api.page(bodies.Run, "/v1/runs", prefix=prefix, sort=order, cursor=cursor, limit=RUNS_SHOWN)
    plain = [RunLine(run.name, run.newest, run.checkpoints, run.bytes, run.attempt, None) for run in runs.items]
    return bodies.Page(items=plain, next=runs.next)


async def _under_way(api: ViewerApi) -> list[bodies.Round]:
    pages = await asyncio.gather(
        *(api.page(bodies.Round, "/v1/rounds", state=state, limit=20) for state in ("open", "sealed"))
    )
    return [made for found in pages for made in found.items]


def _calls(summaries: list[RunSummary]) -> list[Call]:
    found = [Call(summary.run, item) for summary in summaries for item in summary.attention]
    return sorted(found, key=lambda call: _ORDER[call.item.level])
