"""Going on from a checkpoint: lines to copy, and what becomes of newer ones; under Advanced, shards by layout."""

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
from holdfast_formats.rest.runs import RunAbout
from holdfast_service.wings.console import recipes
from holdfast_service.wings.console.recipes import Snippet
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import COOKIE, Asked, ViewerApi, at, shown

router = page_router()

RANKS_SHOWN = 32
NEWER_LISTED = 200
AXES = ("tp", "pp", "ep", "dp")
STAGES = ("stage1", "stage2", "stage3")
Text = Annotated[str, Query(max_length=language.TEXT_BYTES_MAX)]
Small = Annotated[str, Query(max_length=15)]


class WantedLayout(NamedTuple):
    """A layout, the fields with which it was chosen, and the first rank that is shown. `asked` if there is one."""

    fields: dict[str, str]
    text: str
    group: str
    first: int
    asked: bool


class Where(NamedTuple):
    """Where lines to copy find the checkpoint: in a directory, or at an address, which takes a token if it is `closed`."""

    root: str
    url: str
    closed: bool


class ShareView(NamedTuple):
    """A rank's part and its reads; or why that is impossible."""

    rank: int
    plan: bodies.ShardPlan | None
    error: CheckpointError | None


class ShardsView(NamedTuple):
    """The layout's ranks, some of which are listed, and lines to copy; or why there are none."""

    layout: str
    group: str
    first: int
    world: int = 1
    shares: tuple[ShareView, ...] = ()
    lines: tuple[Snippet, ...] = ()
    refused: CheckpointError | None = None

    @property
    def largest(self) -> int:
        return max((share.plan.bytes for share in self.shares if share.plan), default=0)


def _axes(tp: Small = "", pp: Small = "", ep: Small = "", dp: Small = "") -> dict[str, str]:
    return {"tp": tp, "pp": pp, "ep": ep, "dp": dp}


def _fields(
    axes: Annotated[dict[str, str], Depends(_axes)], sharding: Small = "", stage: Small = "", more: Text = ""
) -> dict[str, str]:
    return axes | {"sharding": sharding, "stage": stage, "more": more}


def _asked(
    request: Request,
    fields: Annotated[dict[str, str], Depends(_fields)],
    layout: Annotated[str | None, Query(max_length=language.TEXT_BYTES_MAX)] = None,
    group: Annotated[str, Query(max_length=64)] = "model",
    first: int = 0,
) -> WantedLayout:
    text = _text(fields) if layout is None else layout.strip()
    if layout is not None:
        fields = dict.fromkeys(fields, "") | {"more": text}
    asked = bool({*fields, "layout", "group"} & request.query_params.keys())
    return WantedLayout(fields, text, group, max(first, 0), asked)


@router.get("/runs/{run}/checkpoints/{step}/restore")
async def show_restoring(
    request: Request, api: Asked, run: str, step: str, wanted: Annotated[WantedLayout, Depends(_asked)]
) -> Response:
    """The fields make up the layout's text, unless `layout` gives it as a whole. Shards are looked at only if asked for."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    listed = at(run) + "/checkpoints"
    newer, healthy, nodes, about = await asyncio.gather(
        api.page(bodies.CheckpointInfo, listed, step_min=checkpoint.step + 1, limit=NEWER_LISTED),
        shown(api.get(bodies.CheckpointInfo, at(run, "latest-healthy"))),
        shown(api.page(bodies.Node, "/v1/nodes")),
        shown(api.get(RunAbout, at(run) + "/about")),
    )
    root = recipes.root_of(nodes.value) or "."
    healthy_step = None if healthy.value is None else healthy.value.step
    how = recipes.how_to_reach(checkpoint, newer.items, healthy_step)
    return page(
        request,
        "restore.html",
        run=run,
        made=checkpoint,
        healthy=healthy_step,
        how=how,
        resume=recipes.resume(checkpoint, how, recipes.place(nodes.value, request.base_url), about.value),
        left=recipes.left_behind(checkpoint, newer.items, newer.next is not None, root),
        unhealthy=[one.step for one in newer.items if one.healthy is False],
        fields=wanted.fields if wanted.asked else wanted.fields | _as_saved(checkpoint.world),
        examples=_examples(checkpoint.world),
        stages=STAGES,
        group=wanted.group,
        ranks_shown=RANKS_SHOWN,
        shards=await _shards(api, checkpoint, wanted, Where(root, str(request.base_url), COOKIE in request.cookies))
        if wanted.asked
        else None,
    )


def _as_saved(world: int) -> dict[str, str]:
    """What the form begins with: as FSDP shards it over the ranks that saved it."""
    return {"sharding": str(world), "stage": "stage3"} if world > 1 else {"sharding": "2", "stage": "stage3"}


def _examples(world: int) -> dict[str, str]:
    """Layouts that suit a checkpoint of so many ranks, by what they are."""
    ranks = max(world, 2)
    found = {
        f"FSDP on {ranks} ranks": f"sharding={ranks}:stage3",
        f"FSDP on {2 * ranks} ranks": f"sharding={2 * ranks}:stage3",
    }
    if ranks % 2 == 0 and ranks > 2:
        found[f"2-way tensor parallel × FSDP on {ranks // 2}"] = f"tp=2,sharding={ranks // 2}:stage3"
    return found | {"2-way tensor parallel of a Llama": "tp=2,rules=llama", "one rank with everything": ""}


def _text(fields: dict[str, str]) -> str:
    parts = [f"{axis}={fields[axis]}" for axis in AXES if fields[axis]]
    if fields["sharding"]:
        parts.append(f"sharding={fields['sharding']}" + (f":{fields['stage']}" if fields["stage"] else ""))
    if fields["more"]:
        parts.append(fields["more"])
    return ",".join(parts)


async def _shards(api: ViewerApi, checkpoint: bodies.CheckpointInfo, wanted: WantedLayout, where: Where) -> ShardsView:
    try:
        parsed = language.parse(wanted.text)
        text, world = language.text(parsed), parsed.mesh.world
        ranks = range(wanted.first, min(world, wanted.first + RANKS_SHOWN))
        shares = await _shares(api, checkpoint, text, wanted.group, ranks)
    except CheckpointError as error:
        return ShardsView(wanted.text, wanted.group, wanted.first, refused=error)
    lines = _lines(checkpoint, text, wanted.group, where)
    return ShardsView(text, wanted.group, wanted.first, world, tuple(shares), tuple(lines))


async def _shares(
    api: ViewerApi, checkpoint: bodies.CheckpointInfo, layout: str, group: str, ranks: range
) -> list[ShareView]:
    async def share(rank: int) -> ShareView:
        path = at(checkpoint.run, checkpoint.step, "shard")
        planned = await shown(api.get(bodies.ShardPlan, path, layout=layout, rank=rank, group=group, limit=1))
        return ShareView(rank, planned.value, planned.error)

    return list(await asyncio.gather(*map(share, ranks)))


def _lines(checkpoint: bodies.CheckpointInfo, layout: str, group: str, where: Where) -> list[Snippet]:
    root, url, closed = where
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
    token = '-H "Authorization: Bearer $HOLDFAST_TOKEN" ' if closed else ""
    return [
        Snippet("all-ranks", "Every rank’s shard as a file", f"{command} --all-ranks shards/ --root {shlex.quote(root)}"),
        Snippet("one-rank", "One rank’s shard", f"{command} --rank 0 --out rank0.safetensors --root {shlex.quote(root)}"),
        Snippet("python", "In Python", python),
        Snippet("curl", "Over HTTP, with nothing installed", f"curl -f {token}-o rank0.safetensors {shlex.quote(address)}"),
    ]
