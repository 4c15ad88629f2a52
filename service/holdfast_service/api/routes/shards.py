"""Routes: one rank's shard in any parallel layout, as a safetensors file or as a plan to read it from storage."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from holdfast_formats import naming
from holdfast_formats.rest import bodies
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import delivery, open_checkpoints
from holdfast_service.api.content.delivery import Delivery
from holdfast_service.api.content.shard_plans import PlannedShard, PlannedShards, ShardKey
from holdfast_service.api.content.shard_streams import ShardStreams
from holdfast_service.api.services import URL_S, Cursor, Limit, Services, Urls, Wired

SHARD = "/runs/{run}/checkpoints/{step}/shard"
MEDIA_TYPE = "application/octet-stream"
JSON = "application/json"
LAYOUT_CHARACTERS_MAX = 8192
RANK_MAX = 2**31 - 1

router = APIRouter(prefix="/v1", tags=["shards"], responses=problems.RESPONSES)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The shard, or its plan if Accept requests JSON",
        "content": {MEDIA_TYPE: {}, JSON: {"schema": {"$ref": "#/components/schemas/ShardPlan"}}},
        "model": bodies.ShardPlan,
    },
    206: {"description": "The bytes of the range"},
    304: {"description": "Not changed"},
    416: problems.RESPONSES["default"],
}


def _asked(
    layout: Annotated[
        str,
        Query(
            max_length=LAYOUT_CHARACTERS_MAX,
            description="the parallel layout, as text or JSON; empty: one rank with everything",
            openapi_examples={
                "one rank": {"value": ""},
                "tensor and pipeline parallelism": {"value": "tp=4,pp=2"},
                "expert parallelism, and parameters sharded by rows": {"value": "tp=2,ep=4,sharding=8:stage3:dim0"},
            },
        ),
    ] = "",
    rank: Annotated[int, Query(ge=0, le=RANK_MAX, description="the rank in this layout")] = 0,
    group: Annotated[str, Query(max_length=64, description="the group of tensors, such as `model`")] = "model",
    program: Annotated[
        str,
        Query(max_length=64, description="a built-in mapping program, its name with `-inverse`, or none"),
    ] = "",
) -> ShardKey:
    return ShardKey(layout, rank, group, program)


def _shard(
    request: Request, services: Wired, run: str, step: str, asked: Annotated[ShardKey, Depends(_asked)]
) -> PlannedShard:
    held = request.app.state.opened.open(run, open_checkpoints.find(services, run, step).step)
    planned: PlannedShards = request.app.state.planned
    return planned.find(held, asked)


Shard = Annotated[PlannedShard, Depends(_shard)]


@router.get(
    SHARD,
    dependencies=needs("read"),
    response_class=Response,
    responses=_ANSWERS,
    summary="A rank's shard in any parallel layout, or the plan to read it",
)
async def get_shard(
    request: Request, services: Wired, shard: Shard, cursor: Cursor = None, limit: Limit = 100, urls: Urls = False
) -> Response:
    """A standard safetensors file of one rank's shard, assembled while it is sent. Every extent is verified first.

    Single ranges and `If-Range` work as for files. The same checkpoint, layout, rank, group and program give the same
    strong ETag and the same bytes, whatever the spelling of the layout. `Accept-Encoding: zstd` is supported; then
    there is no length.

    With `Accept: application/json` the answer is the plan: a page of local tensors, their parts, and the extents
    to read, with their digests. `cursor`, `limit` and `urls` apply only to plans. With `urls=true` it has, for a root in
    a bucket, a URL for each file to read, which reads any range without a token until it ends.
    """
    if _prefers_plan(request.headers.get("accept", "")):
        if urls:
            return await asyncio.to_thread(_signed_plan, services, shard, cursor, limit)
        return await asyncio.to_thread(_plan, shard, request.headers.get("if-none-match"), cursor, limit)
    return await delivery.deliver(_delivery(request, shard), request.headers)


@router.head(SHARD, dependencies=needs("read"), response_class=Response, summary="A shard's length and ETag")
def head_shard(request: Request, shard: Shard, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """The headers of the GET answer. No extent is read."""
    if _prefers_plan(request.headers.get("accept", "")):
        return _plan(shard, request.headers.get("if-none-match"), cursor, limit)
    return delivery.deliver_head(_delivery(request, shard), request.headers)


def _delivery(request: Request, shard: PlannedShard) -> Delivery:
    streams: ShardStreams = request.app.state.streams
    return Delivery(MEDIA_TYPE, shard.etag, shard.recipe.file.bytes, partial(streams.body, shard.recipe), ("Accept",))


def _plan(shard: PlannedShard, known: str | None, cursor: str | None, limit: int) -> Response:
    encoded = shard.page(cursor, limit).model_dump_json().encode()
    headers = {"ETag": f'"{hashlib.sha256(encoded).hexdigest()[:32]}"', "Vary": "Accept, Accept-Encoding"}
    if delivery.not_modified(known, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(encoded, media_type=JSON, headers=headers)


def _signed_plan(services: Services, shard: PlannedShard, cursor: str | None, limit: int) -> Response:
    plan = shard.page(cursor, limit)
    directory, storage = naming.checkpoint_path(plan.run, plan.step), services.control.storage
    names = sorted({read.file for read in plan.reads})
    signed = plan.model_copy(update={"urls": {name: storage.presigned(f"{directory}/{name}", URL_S) for name in names}})
    return Response(signed.model_dump_json(), media_type=JSON, headers={"Cache-Control": "no-store", "Vary": "Accept"})


def _prefers_plan(accept: str) -> bool:
    """Whether an Accept header asks for JSON with a higher weight than for bytes. Wildcards such as */* mean
    bytes.
    """
    named = delivery.weights(accept)
    return named.get(JSON, 0.0) > named.get(MEDIA_TYPE, 0.0)
