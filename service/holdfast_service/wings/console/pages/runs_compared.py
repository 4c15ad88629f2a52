"""Runs side by side: a metric of their checkpoints, overlaid by step, and what each pays for its checkpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import isfinite
from typing import Annotated, Any, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import RunSummary
from holdfast_service.wings.console.history import MetricExtremes, metrics
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.run_status import RunStatus, standing
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, ViewerApi, at

router = page_router()

RUNS_MAX = 8  # more lines cannot be distinguished
PRESELECTED = 4
CHOICES = 50
Names = Annotated[list[str] | None, Query(max_length=64)]
Text = Annotated[str, Query(max_length=128)]


class ComparedRun(NamedTuple):
    """A run, its newest checkpoints, the oldest first, and the chosen metric of them."""

    summary: RunSummary
    checkpoints: list[bodies.CheckpointInfo]
    metric: MetricExtremes | None
    newest: float | None
    standing: RunStatus


@router.get("/compare")
async def compare_runs(request: Request, api: Asked, run: Names = None, metric: Text = "", q: Text = "") -> Response:
    """The chosen runs, `RUNS_MAX` at most, and a form to choose others. Without a choice, those that saved last of the
    runs that the search finds.
    """
    listed = await api.page(RunSummary, "/v1/summaries", q=q, sort="age", failed="false", limit=CHOICES)
    newest = [summary.run for summary in listed.items if summary.newest is not None]
    chosen = list(dict.fromkeys(run or newest[: RUNS_MAX if q else PRESELECTED]))
    read = await asyncio.gather(*(_read(api, name) for name in chosen[:RUNS_MAX]))
    names = Counter(name for _, checkpoints in read for one in metrics(checkpoints) for name in [one.name])
    wanted = metric if metric in names else next((name for name, _ in names.most_common(1)), "")
    lines = [_compared(summary, checkpoints, wanted) for summary, checkpoints in read]
    return page(
        request,
        "runs.html",
        q=q,
        chosen=chosen[:RUNS_MAX],
        left_out=len(chosen) - len(chosen[:RUNS_MAX]),
        runs_max=RUNS_MAX,
        choices=sorted({summary.run for summary in listed.items} | set(chosen[:RUNS_MAX])),
        metrics=sorted(names),
        metric=wanted,
        lines=lines,
        drawn={"metric": wanted, "runs": [_drawn(one, wanted) for one in lines]},
    )


async def _read(api: ViewerApi, run: str) -> tuple[RunSummary, list[bodies.CheckpointInfo]]:
    summary, checkpoints = await asyncio.gather(
        api.get(RunSummary, at(run) + "/summary"),
        api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=LIMIT_MAX),
    )
    return summary, list(reversed(checkpoints.items))


def _compared(summary: RunSummary, checkpoints: list[bodies.CheckpointInfo], metric: str) -> ComparedRun:
    of_it = next((one for one in metrics(checkpoints) if one.name == metric), None)
    values = [one.metrics[metric] for one in checkpoints if metric in one.metrics]
    return ComparedRun(summary, checkpoints, of_it, values[-1] if values else None, standing(summary.life))


def _drawn(one: ComparedRun, metric: str) -> dict[str, Any]:
    """Steps and finite values of the metric."""
    points = [
        (checkpoint.step, checkpoint.metrics[metric])
        for checkpoint in one.checkpoints
        if isfinite(checkpoint.metrics.get(metric, float("nan")))
    ]
    return {"run": one.summary.run, "steps": [step for step, _ in points], "values": [value for _, value in points]}
