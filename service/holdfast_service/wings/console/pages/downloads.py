"""Every table as a CSV file, with the filters and the order of the page that links to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import lists
from holdfast_formats.rest.columns import Listing
from holdfast_service.wings.console.rendering import HEADERS
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, ViewerApi, at

router = page_router()

ROWS_MAX = 20_000
_SUMMARIES: Listing[Any] = Listing(
    path="/v1/summaries",
    fields=(
        *("run", "state", "newest", "checkpoints", "bytes", "last_commit", "exposed_s", "stall_p50_s", "stall_p95_s"),
        *("goodput_lost", "failed", "dropped", "saves", "metrics"),
    ),
    filters=("prefix", "q", "tag", "sort"),
)
_FILES: Listing[Any] = Listing((), "files", ("name", "bytes", "stored", "digest"))
_TENSORS: Listing[Any] = Listing(
    (), "tensors", ("group", "name", "dtype", "shape", "bytes", "file", "placement"), ("group",)
)
OF_ALL: Mapping[str, Listing[Any]] = {
    "runs": _SUMMARIES,
    "groups": lists.RUN_GROUPS,
    "jobs": lists.JOBS,
    "events": lists.EVENTS,
    "nodes": lists.NODES,
    "quotas": lists.QUOTAS,
    "saves": lists.SAVES,
    "storage": lists.STORAGE,
    "tokens": lists.TOKENS,
}
OF_RUN: Mapping[str, Listing[Any]] = {"checkpoints": lists.checkpoints(True), "compare": lists.DIFFERENCES}
OF_CHECKPOINT: Mapping[str, Listing[Any]] = {"files": _FILES, "tensors": _TENSORS, "statistics": lists.STATISTICS}


@router.get("/csv/{table}")
async def of_all(request: Request, api: Asked, table: str) -> Response:
    listing = _named(OF_ALL, table)
    return await _file(request, api, listing, listing.path, table)


@router.get("/runs/{run}/csv/{table}")
async def of_run(request: Request, api: Asked, run: str, table: str) -> Response:
    listing = _named(OF_RUN, table)
    return await _file(request, api, listing, f"{at(run)}/{listing.path}", f"{run}-{table}")


@router.get("/runs/{run}/checkpoints/{step}/csv/{table}")
async def of_checkpoint(request: Request, api: Asked, run: str, step: str, table: str) -> Response:
    listing = _named(OF_CHECKPOINT, table)
    return await _file(request, api, listing, at(run, step, listing.path), f"{run}-{step}-{table}")


def _named(tables: Mapping[str, Listing[Any]], name: str) -> Listing[Any]:
    if name not in tables:
        raise NoSuchResource(f"there is no table {name!r}", hint=f"one of {', '.join(tables)}")
    return tables[name]


async def _file(request: Request, api: ViewerApi, listing: Listing[Any], path: str, name: str) -> Response:
    """The first rows of the list, up to a spreadsheet's comfortable size; the file's name marks truncation."""
    asked: dict[str, Any] = {key: request.query_params.get(key) for key in listing.filters}
    rows: list[Mapping[str, Any]] = []
    cursor: str | None = None
    while len(rows) < ROWS_MAX:
        answer = (await api.request("GET", path, **asked, cursor=cursor, limit=LIMIT_MAX)).json()
        rows += map(listing.filled, answer["items"])
        cursor = answer.get("next")
        if cursor is None:
            break
    text = listing.csv(rows[:ROWS_MAX])
    plain = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "-" for one in name)
    file = f"{plain}{f'-first-{ROWS_MAX}' if cursor is not None else ''}.csv"
    about = {**HEADERS, "Content-Disposition": f'attachment; filename="{file}"'}
    return Response(text.encode(), headers=about, media_type="text/csv; charset=utf-8")
