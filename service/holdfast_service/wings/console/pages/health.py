"""A run's health by layer over its steps, as a heat map with the same numbers in a table."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import LayerHealth, Layers
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, at, shown

router = page_router()

WORST_SHOWN = 20


class Cell(NamedTuple):
    layer: str
    health: LayerHealth


@router.get("/runs/{run}/health")
async def show_health(
    request: Request, api: Asked, run: str, group: Annotated[str, Query(max_length=64)] = "model"
) -> Response:
    """Show the map, which a script draws from the numbers. The worst cells are also in a table, for viewers
    without the map.
    """
    run_found = await api.get(bodies.Run, at(run))
    newest = await api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=1)
    layers = await shown(api.get(Layers, at(run) + "/layers", group=group))
    cells = [
        Cell(name, health)
        for name, column in (layers.value.layers if layers.value else {}).items()
        for health in column
        if health is not None
    ]
    sick = sorted((cell for cell in cells if cell.health.nonfinite), key=lambda cell: -cell.health.step)
    moved = sorted((cell for cell in cells if cell.health.change), key=lambda cell: -(cell.health.change or 0))
    return page(
        request,
        "health.html",
        run=run_found,
        group=group,
        groups=newest.items[0].groups if newest.items else [],
        layers=layers,
        drawn=None if layers.value is None else layers.value.model_dump(),
        sick=sick[:WORST_SHOWN],
        moved=moved[:WORST_SHOWN],
    )
