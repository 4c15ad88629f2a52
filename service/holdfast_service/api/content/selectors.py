"""Selectors in paths besides numbers: the newest healthy checkpoint, and the best one by a metric."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query

from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from holdfast_formats.rest import bodies
from holdfast_service.api.services import Services
from holdfast_service.control.findings import selection

LATEST_HEALTHY, BEST = "latest-healthy", "best"
NAMES = (LATEST_HEALTHY, BEST)

Metric = Annotated[
    str | None, Query(max_length=128, description="with `best`: name of a metric in the `metrics` of the save")
]
Mode = Annotated[Literal["min", "max"], Query(description="with `best`: whether the lowest or the highest value is best")]


def find(
    services: Services, run: str, name: str, metric: str | None = None, mode: selection.Mode = "min"
) -> bodies.CheckpointInfo:
    """The checkpoint that one of `NAMES` names; `NoSuchRun`, `NoSuchCheckpoint`, or `InvalidRequest` without a metric."""
    services.control.catalog.check_run(run)
    database = services.control.catalog.database
    if name == LATEST_HEALTHY:
        step, what = selection.newest_healthy(database, run), "that is verified and not known to be unhealthy"
    elif metric is None:
        raise InvalidRequest(
            "`best` needs a metric", hint=f"GET /v1/runs/{run}/checkpoints/best?metric=loss&mode=min returns the best step"
        )
    else:
        step, what = selection.best(database, run, metric, mode), f"with the metric {metric!r} among the healthy ones"
    if step is None:
        raise NoSuchCheckpoint(
            f"run {run!r} has no checkpoint {what}", hint=f"list its checkpoints with `holdfast ls {run}`"
        )
    return services.control.catalog.checkpoint(run, step)
