"""Restoring into a layout: a form to choose it, the bytes of every rank, and the exact lines to copy."""

from __future__ import annotations

import asyncio
import shlex
from typing import Annotated, NamedTuple
from urllib.parse import quote

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError
from holdfast_formats.layout import language
from holdfast_formats.rest import bodies
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at, shown

router = page_router()

RANKS_SHOWN = 32
AXES = ("tp", "pp", "ep", "dp")
STAGES = ("stage1", "stage2", "stage3")
Text = Annotated[str, Query(max_length=language.TEXT_BYTES_MAX)]
Small = Annotated[str, Query(max_length=15)]


class WantedLayout(NamedTuple):
    """A layout, the fields with which it was chosen, and the first rank that is shown."""

    fields: dict[str, str]
    text: str
    group: str
    first: int


class ShareView(NamedTuple):
    """A rank's part and its reads; or why that is impossible."""

    rank: int
    plan: bodies.ShardPlan | None
    error: CheckpointError | None


class Lines(NamedTuple):
    """Commands and code for the layout, ready to be copied."""

    all_ranks: str
    one_rank: str
    python: str
    curl: str


def _axes(tp: Small = "", pp: Small = "", ep: Small = "", dp: Small = "") -> dict[str, str]:
    return {"tp": tp, "pp": pp, "ep": ep, "dp": dp}


def _fields(
    axes: Annotated[dict[str, str], Depends(_axes)], sharding: Small = "", stage: Small = "", more: Text = ""
) -> dict[str, str]:
    return axes | {"sharding": sharding, "stage": stage, "more": more}


def _asked(
    fields: Annotated[dict[str, str], Depends(_fields)],
    layout: Annotated[str | None, Query(max_length=language.TEXT_BYTES_MAX)] = None,
    group: Annotated[str, Query(max_length=64)] = "model",
    first: int = 0,
) -> WantedLayout:
    return WantedLayout(fields, _text(fields) if layout is None else layout.strip(), group, max(first, 0))


@router.get("/runs/{run}/checkpoints/{step}/restore")
async def show_restoring(
    request: Request, api: Asked, run: str, step: str, wanted: Annotated[WantedLayout, Depends(_asked)]
) -> Response:
    """The fields make up the layout's text, unless `layout` gives it as a whole."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    text, group, first = wanted.text, wanted.group, wanted.first
    shares: list[ShareView] = []
    refused: CheckpointError | None = None
    world = 1
    try:
        parsed = language.parse(text)
        text, world = language.text(parsed), parsed.mesh.world
        shares = await _shares(api, checkpoint, text, group, range(first, min(world, first + RANKS_SHOWN)))
    except CheckpointError as error:
        refused = error
    files = await shown(api.page(bodies.Node, "/v1/nodes"))
    root = (files.value.items[0].root if files.value and files.value.items else None) or "."
    return page(
        request,
        "restore.html",
        run=run,
        made=checkpoint,
        fields=wanted.fields,
        axes=AXES,
        stages=STAGES,
        layout=text,
        group=group,
        world=world,
        first=first,
        ranks_shown=RANKS_SHOWN,
        shares=shares,
        refused=refused,
        largest=max((share.plan.bytes for share in shares if share.plan), default=0),
        lines=_lines(checkpoint, text, group, (root, str(request.base_url))),
    )


def _text(fields: dict[str, str]) -> str:
    parts = [f"{axis}={fields[axis]}" for axis in AXES if fields[axis]]
    if fields["sharding"]:
        parts.append(f"sharding={fields['sharding']}" + (f":{fields['stage']}" if fields["stage"] else ""))
    if fields["more"]:
        parts.append(fields["more"])
    return ",".join(parts)


async def _shares(
    api: ViewerApi, checkpoint: bodies.CheckpointInfo, layout: str, group: str, ranks: range
) -> list[ShareView]:
    async def share(rank: int) -> ShareView:
        path = at(checkpoint.run, checkpoint.step, "shard")
        planned = await shown(api.get(bodies.ShardPlan, path, layout=layout, rank=rank, group=group, limit=1))
        return ShareView(rank, planned.value, planned.error)

    return list(await asyncio.gather(*map(share, ranks)))


def _lines(checkpoint: bodies.CheckpointInfo, layout: str, group: str, where: tuple[str, str]) -> Lines:
    root, url = where
    name, cut = f"{checkpoint.run}@{checkpoint.step}", shlex.quote(layout)
    grouped = "" if group == "model" else f" --group {shlex.quote(group)}"
    command = f"holdfast restore {name} --layout {cut}{grouped}"
    argument = "" if group == "model" else f", group={group!r}"
    python = (
        "import holdfast\n\n"
        f"with holdfast.open({name!r}, root={root!r}) as checkpoint:\n"
        f'    shard = checkpoint.shard({layout!r}, rank=0{argument}, framework="torch")\n'
    )
    shard = at(checkpoint.run, checkpoint.step, "shard")
    address = f"{url.rstrip('/')}{shard}?layout={quote(layout, safe='=,:/')}&rank=0&group={group}"
    return Lines(
        f"{command} --all-ranks shards/ --root {shlex.quote(root)}",
        f"{command} --rank 0 --out rank0.safetensors --root {shlex.quote(root)}",
        python,
        f"curl -o rank0.safetensors {shlex.quote(address)}",
    )
