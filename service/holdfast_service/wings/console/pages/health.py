"""A run's health by layer over its steps, as a heat map with the same numbers in a table."""

from __future__ import annotations

import asyncio
from typing import Annotated, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import LayerHealth, Layers, RunSummary
from holdfast_formats.rest.statistics import layer_of
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, at, shown

router = page_router()

WORST_SHOWN = 20


class Cell(NamedTuple):
    layer: str
    health: LayerHealth


@router.get("/runs/{run}/health")
async def show_health(request: Request, api: Asked, run: str, group: Annotated[str, Query(max_length=64)] = "") -> Response:
    """Show the map, which a script draws from the numbers. The worst cells are also in a table, for viewers
    without the map.
    """
    run_found = await api.get(bodies.Run, at(run))
    newest, summary = await asyncio.gather(
        api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=1), shown(api.get(RunSummary, at(run) + "/summary"))
    )
    since = None if summary.value is None else summary.value.nonfinite
    group = group or (since and since.group) or "model"
    first = layer_of(since.tensor) if since and since.tensor and since.group == group else None
    layers = await shown(api.get(Layers, at(run) + "/layers", group=group))
    cells = [
        Cell(name, health)
        for name, column in (layers.value.layers if layers.value else {}).items()
        for health in column
        if health is not None
    ]
    sick = [cell for cell in cells if cell.health.nonfinite]
    if first is None or since is None:
        sick.sort(key=lambda cell: -cell.health.step)
    else:  # where it began, and how it went on
        sick.sort(key=lambda cell: (cell.health.step < since.step, cell.health.step, cell.layer != first))
    moved = sorted((cell for cell in cells if cell.health.change), key=lambda cell: -(cell.health.change or 0))
    return page(
        request,
        "health.html",
        run=run_found,
        group=group,
        groups=newest.items[0].groups if newest.items else [],
        layers=layers,
        drawn=None if layers.value is None else layers.value.model_dump(),
        since=since if first is not None else None,
        first=first,
        sick=sick[:WORST_SHOWN],
        moved=moved[:WORST_SHOWN],
    )
