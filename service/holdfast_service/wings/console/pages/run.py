"""A run: its figures, how to resume it, its checkpoints with the policy's verdicts on them, and its saves."""

from __future__ import annotations

import asyncio
from typing import Annotated, NamedTuple
from zlib import crc32

from fastapi import Depends, Query, Request
from starlette.responses import JSONResponse, Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Alert, RunSummary
from holdfast_formats.rest.replica_lags import ReplicaLag, of_run
from holdfast_formats.rest.retention import Preview
from holdfast_formats.rest.runs import RunAbout
from holdfast_service.wings.console import history, recipes, refreshed_parts, run_status
from holdfast_service.wings.console.pages.overview import KINDS
from holdfast_service.wings.console.recipes import LeftBehind, Snippet
from holdfast_service.wings.console.rendering import HEADERS, link, may_of, page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, PagePart, ViewerApi, at, shown, to

router = page_router()

CHECKPOINTS_SHOWN = 10
ROUNDS_LOOKED_AT = 50
FAILED_SHOWN = 20
SAVES_DRAWN = LIMIT_MAX
BACK = "run"
VERDICTS_UP_TO = 2000  # checkpoints; the reasons of more than these are on the policy's own page
STATES = ("committed", "verified", "unhealthy", "abandoned", "damaged")
Text = Annotated[str, Query(max_length=200)]


def _filters(
    state: Text = "", label: Text = "", step_min: Text = "", step_max: Text = "", sort: Text = ""
) -> dict[str, str]:
    return {"state": state, "label": label, "step_min": step_min, "step_max": step_max, "sort": sort}


Filters = Annotated[dict[str, str], Depends(_filters)]


@router.get("/runs/{run}")
async def show_run(request: Request, api: Asked, run: str, filters: Filters, cursor: str | None = None) -> Response:
    """Figures, how to resume, and a page of checkpoints. The plots fetch the saves after that."""
    path = at(run) + "/checkpoints"
    run_found, listed, newest, rounds, summary, (nodes, about) = await asyncio.gather(
        api.get(bodies.Run, at(run)),
        api.page(bodies.CheckpointInfo, path, cursor=cursor, limit=CHECKPOINTS_SHOWN, **filters),
        api.page(bodies.CheckpointInfo, path, limit=CHECKPOINTS_SHOWN),
        api.page(bodies.Round, "/v1/rounds", run=run, limit=ROUNDS_LOOKED_AT),
        shown(api.get(RunSummary, at(run) + "/summary")),
        _where(api, run),
    )
    preview = await _preview(api, run_found)
    kept_averages = [] if nodes.value is None else [one for node in nodes.value.items for one in node.averages]
    alerts = _alerts(summary.value)
    may = may_of(request)
    unseen = [one for one in alerts if one.acknowledged is None]
    by_level = {level: [one for one in unseen if one.level == level] for level in ("error", "warning")}
    ends = [f"{item.id} {item.state}" for item in rounds.items[:CHECKPOINTS_SHOWN]]
    return page(
        request,
        "run.html",
        run=run_found,
        summary=summary.value,
        verdict=None if summary.value is None else run_status.verdict(summary.value),
        alerts={level: [refreshed_parts.alert(one, BACK, may) for one in some] for level, some in by_level.items()},
        seen=[refreshed_parts.alert(one, BACK, may) for one in alerts if one.acknowledged is not None],
        alerts_open=len(unseen),
        errors_open=len(by_level["error"]),
        kinds=" ".join(KINDS),
        here=link(to(run), cursor=cursor, **filters),
        newest=newest.items[0] if newest.items else None,
        checkpoints=listed.items,
        next=listed.next,
        first=cursor is None,
        filters=filters,
        states=STATES,
        average=next((one for one in kept_averages if one.run == run), None),
        preview=preview.value,
        verdicts={verdict.step: verdict for verdict in preview.value.verdicts} if preview.value else {},
        failed=[item for item in rounds.items if item.state in ("aborted", "dropped")][:FAILED_SHOWN],
        under_way=[item for item in rounds.items if item.state in ("open", "sealed")],
        saved_as=crc32(" ".join([*ends, *(f"{one.step} {one.state} {one.pinned}" for one in newest.items)]).encode()),
        copies=_copies(run, summary.value, nodes.value),
        full_in=_full_in(summary.value, newest, rounds, preview.value),
        resume=_resume(summary.value, newest, nodes.value, about.value, request),
    )


def _copies(run: str, summary: RunSummary | None, nodes: bodies.Page[bodies.Node] | None) -> list[ReplicaLag]:
    """How far each replica is behind with this run."""
    lags = [] if nodes is None else [lag for node in nodes.items for lag in node.lags]
    return [] if summary is None else of_run(run, summary.copies, lags)


@router.get("/runs/{run}/saves")
async def saves(api: Asked, run: str) -> Response:
    """What the plots of the run's page draw: its newest saves, and what to mark on them."""
    run_found, drawn, rounds, summary = await asyncio.gather(
        api.get(bodies.Run, at(run)),
        api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=SAVES_DRAWN),
        api.page(bodies.Round, "/v1/rounds", run=run, limit=SAVES_DRAWN),
        shown(api.get(RunSummary, at(run) + "/summary")),
    )
    found = history.saves(drawn.items, rounds.items, complete=drawn.next is None)
    return JSONResponse(
        {
            "saves": history.columns(found),
            "all": drawn.next is None,
            "lanes": history.OUTCOMES,
            "marks": history.marks(drawn.items, None if summary.value is None else summary.value.nonfinite),
            "metrics": [one._asdict() for one in history.metrics(drawn.items)],
            "held": max(run_found.bytes - sum(item.bytes - item.shared_bytes for item in drawn.items), 0),
        },
        headers=HEADERS,
    )


async def _where(api: ViewerApi, run: str) -> tuple[PagePart[bodies.Page[bodies.Node]], PagePart[RunAbout]]:
    """Where the run is stored, and how it was launched."""
    return await asyncio.gather(shown(api.page(bodies.Node, "/v1/nodes")), shown(api.get(RunAbout, at(run) + "/about")))


class Resume(NamedTuple):
    """How training goes on from a step: lines to copy, and what becomes of newer checkpoints."""

    step: int
    recipes: list[Snippet]
    left: LeftBehind | None


def _resume(
    summary: RunSummary | None,
    newest: bodies.Page[bodies.CheckpointInfo],
    nodes: bodies.Page[bodies.Node] | None,
    about: RunAbout | None,
    request: Request,
) -> Resume | None:
    """From the last good checkpoint: of the newer ones, `restore()` skips the damaged and abandoned, `healthy=True` those
    with NaN too.
    """
    good = None if summary is None else summary.good
    if summary is None or good is None or not newest.items:
        return None
    how: recipes.How = "healthy" if summary.nonfinite is not None else "newest"
    place = recipes.place(nodes, request.base_url)
    like = newest.items[0].model_copy(update={"step": good.step})
    newer = [one for one in newest.items if one.step > good.step]
    more = len(newer) == len(newest.items) and newest.next is not None
    left = recipes.left_behind(like, newer, more, recipes.root_of(nodes) or ".")
    return Resume(good.step, recipes.resume(like, how, place, about), left)


def _full_in(
    summary: RunSummary | None,
    newest: bodies.Page[bodies.CheckpointInfo],
    rounds: bodies.Page[bodies.Round],
    preview: Preview | None,
) -> float | None:
    """Seconds until the disk or the quota is full. Where the policy removes checkpoints, or may, storage does not grow for
    ever.
    """
    if summary is None or preview is None or preview.policy.limits:
        return None
    return history.full_in(summary, history.saves(newest.items, rounds.items, complete=newest.next is None))


def _alerts(summary: RunSummary | None) -> list[Alert]:
    return [] if summary is None else [Alert(run=summary.run, **vars(item)) for item in summary.attention]


async def _preview(api: ViewerApi, run: bodies.Run) -> PagePart[Preview]:
    if run.checkpoints > VERDICTS_UP_TO:
        return PagePart(None)
    return await shown(api.get(Preview, at(run.name) + "/retention"))
