"""Routes: statistics that verification computed, per tensor and per layer."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray

from holdfast_formats import naming
from holdfast_formats.errors import CorruptStatistics, InvalidRequest, NoSuchResource
from holdfast_formats.rest import bodies, statistics
from holdfast_formats.rest.measurements import Layers, TensorStatistics
from holdfast_formats.rest.statistics import Statistics
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import open_checkpoints
from holdfast_service.api.content.open_checkpoints import Columns, Contents, OpenedCheckpoints
from holdfast_service.api.services import Cursor, Limit, Services, Wired
from holdfast_service.control.catalog.statistics import LAST_MAX, StatisticsStore

Sort = Literal["name", "rms", "change", "nonfinite", "bytes", "zeros"]
Group = Annotated[str | None, Query(max_length=64, description="only this group")]
By = Annotated[Sort, Query(description="`name` sorts ascending; all others sort descending, with unknown values last")]
Text = Annotated[str, Query(alias="q", max_length=256, description="only tensors whose names contain this")]
Last = Annotated[int, Query(ge=1, le=LAST_MAX, description="number of newest steps")]

router = APIRouter(prefix="/v1", tags=["contents"], responses=problems.RESPONSES)


@router.get(
    "/runs/{run}/checkpoints/{step}/statistics",
    dependencies=needs("read"),
    summary="Statistics of the tensors' values",
)
def list_statistics(  # noqa: PLR0913 — one parameter a filter
    request: Request,
    services: Wired,
    run: str,
    step: str,
    group: Group = None,
    sort: By = "name",
    q: Text = "",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[TensorStatistics]:
    """Computed when the checkpoint is verified after its commit; 404 before that. They never change."""
    opened = request.app.state.opened
    assert isinstance(opened, OpenedCheckpoints)
    held = _held(services, opened, run, step)
    if group is not None and group not in held.manifest.tensors:
        raise NoSuchResource(f"there is no group {group!r}", hint=f"groups: {', '.join(held.manifest.groups)}")
    found = StatisticsStore(services.control.catalog.database).load(run, held.manifest.step)
    listed = held.columns.listed
    thinned = held.manifest.thinned is not None and len(listed) != len(found)
    if thinned or held.manifest.compacted is not None:
        raise NoSuchResource(
            f"the statistics of {run}@{step} describe its tensors before it was thinned or compacted",
            hint=f"`GET /v1/runs/{run}/layers` still has them, by layer",
        )
    if len(listed) != len(found):
        raise CorruptStatistics(f"the stored statistics of {run}@{step} belong to another checkpoint")
    order = _ordered(_by_name(held.columns, group, q), sort, found, held.columns)
    first = 0 if cursor is None else _behind(cursor, sort, order)
    shown = order[first : first + limit].tolist()
    items = [statistics.describe(found, position, *listed[position]) for position in shown]
    more = first + limit < len(order)
    return bodies.Page(items=items, next=open_checkpoints.encode_cursor(sort, str(shown[-1])) if more else None)


@router.get(
    "/runs/{run}/layers",
    dependencies=needs("read"),
    summary="Health per layer over the newest steps, for a heat map",
)
def get_layers(services: Wired, run: str, group: Annotated[str, Query(max_length=64)] = "model", last: Last = 50) -> Layers:
    """Steps ascend. Steps of removed checkpoints are included if they are among the newest."""
    services.control.catalog.check_run(run)
    return StatisticsStore(services.control.catalog.database).layers(run, group, last)


def _held(services: Services, opened: OpenedCheckpoints, run: str, step: str) -> Contents:
    """The checkpoint; the catalog is asked for one that is named by a selector, or why there is none of this number."""
    if re.fullmatch(r"[0-9]{1,18}", step):
        with suppress(InvalidRequest):
            commit = f"{naming.checkpoint_path(run, int(step))}/{naming.COMMIT}"
            if (
                services.control.records.size(commit) is not None
            ):  # opening one that does not exist would register a reader of it
                return opened.open(run, int(step))
    return opened.open(run, open_checkpoints.find(services, run, step).step)


def _by_name(columns: Columns, group: str | None, part: str) -> NDArray[np.int64]:
    """Positions of the group's tensors with this in their names, sorted by name."""
    if group is None and not part:
        return columns.order
    wanted = np.array([group in (None, held) and part in name for held, name, _ in columns.listed], np.bool_)
    return columns.order[wanted[columns.order]]


def _ordered(by_name: NDArray[np.int64], sort: Sort, statistics: Statistics, columns: Columns) -> NDArray[np.int64]:
    """Positions in the manifest, in the requested order; equal ones by name."""
    if sort == "name" or not by_name.size:
        return by_name
    if sort == "bytes":
        values = columns.sizes[by_name]
    elif sort == "nonfinite":
        values = statistics.nonfinite[by_name].astype(np.float64)
    elif sort == "zeros":
        values = statistics["zeros"][by_name] / np.maximum(columns.elements[by_name], 1)
    else:
        values = statistics[sort][by_name]
    return by_name[np.argsort(-values, kind="stable")]


def _behind(cursor: str, sort: Sort, order: NDArray[np.int64]) -> int:
    """The place after the cursor's tensor."""
    by, position = open_checkpoints.decode_cursor(cursor, 2)
    number = int(position) if position.isascii() and position.isdigit() and len(position) < 12 else -1
    at = np.flatnonzero(order == number)
    if by != sort or len(at) != 1:
        raise InvalidRequest("the cursor does not belong to this list", hint="pass `next` of the previous page unchanged")
    return int(at[0]) + 1
