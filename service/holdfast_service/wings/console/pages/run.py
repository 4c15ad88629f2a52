"""A run: its saves, its checkpoints, and the policy's verdicts on them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Alert, RunSummary
from holdfast_formats.rest.retention import Preview
from holdfast_service.wings.console import history, recipes, refreshed_parts, run_status
from holdfast_service.wings.console.pages.overview import KINDS
from holdfast_service.wings.console.recipes import Snippet
from holdfast_service.wings.console.rendering import link, may_of, page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, PagePart, ViewerApi, at, shown, to

router = page_router()

CHECKPOINTS_SHOWN = 10
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
    """Tiles, timeline and plots of the newest saves, and a page of checkpoints."""
    run_found = await api.get(bodies.Run, at(run))
    listed, drawn, rounds, summary, preview, nodes = await asyncio.gather(
        api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", cursor=cursor, limit=CHECKPOINTS_SHOWN, **filters),
        api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=SAVES_DRAWN),
        api.page(bodies.Round, "/v1/rounds", run=run, limit=SAVES_DRAWN),
        shown(api.get(RunSummary, at(run) + "/summary")),
        _preview(api, run_found),
        shown(api.page(bodies.Node, "/v1/nodes")),
    )
    kept_averages = [] if nodes.value is None else [one for node in nodes.value.items for one in node.averages]
    by_step = {verdict.step: verdict for verdict in preview.value.verdicts} if preview.value else {}
    kept = {verdict.step for verdict in by_step.values() if verdict.pinned or verdict.labels}
    alerts = _alerts(summary.value)
    may = may_of(request)
    unseen = [one for one in alerts if one.acknowledged is None]
    by_level = {level: [one for one in unseen if one.level == level] for level in ("error", "warning")}
    saves = history.saves(drawn.items, rounds.items, kept, complete=drawn.next is None)
    failed = [item for item in rounds.items if item.state in ("aborted", "dropped")]
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
        metrics=history.metrics(drawn.items),
        newest=drawn.items[0] if drawn.items else None,
        checkpoints=listed.items,
        next=listed.next,
        first=cursor is None,
        filters=filters,
        states=STATES,
        average=next((one for one in kept_averages if one.run == run), None),
        verdicts=by_step,
        saved=preview.value.bytes_saved if preview.value else 0,
        next_saved=preview.value.bytes_thinned + preview.value.bytes_compacted if preview.value else 0,
        could_save=preview.value.could_save if preview.value else {},
        failed=failed[:20],
        under_way=[item for item in rounds.items if item.state in ("open", "sealed")],
        saves=saves,
        marks=history.marks(drawn.items, None if summary.value is None else summary.value.nonfinite),
        held_before=max(run_found.bytes - sum(item.bytes for item in drawn.items), 0),
        full_in=None if summary.value is None else history.full_in(summary.value, saves, limited=_limits(preview.value)),
        resume=_resume(run_found, summary.value, drawn.items, recipes.place(nodes.value, request.base_url)),
        lanes=history.OUTCOMES,
        drawn_all=drawn.next is None,
    )


def _limits(preview: Preview | None) -> bool:
    """Whether the policy removes checkpoints, or may: then storage does not grow for ever."""
    return preview is None or preview.policy.limits


def _resume(
    run: bodies.Run,
    summary: RunSummary | None,
    drawn: list[bodies.CheckpointInfo],
    place: str,
) -> Snippet | None:
    """For a run that died: the loop that goes on from its last good checkpoint."""
    good = None if summary is None or run.life != "died" else summary.good
    if summary is None or good is None or not drawn:
        return None
    how: recipes.How = "healthy" if summary.nonfinite is not None else "newest"
    return recipes.resume(drawn[0].model_copy(update={"step": good.step}), how, place)[0]


def _alerts(summary: RunSummary | None) -> list[Alert]:
    return [] if summary is None else [Alert(run=summary.run, **vars(item)) for item in summary.attention]


async def _preview(api: ViewerApi, run: bodies.Run) -> PagePart[Preview]:
    if run.checkpoints > VERDICTS_UP_TO:
        return PagePart(None)
    return await shown(api.get(Preview, at(run.name) + "/retention"))
