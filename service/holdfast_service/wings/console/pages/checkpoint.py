"""A checkpoint: the facts, its copies, its files with a map of each, and the possible actions."""

from __future__ import annotations

import asyncio
from typing import Annotated, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from holdfast_files.objects import costs
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.disk.thinning import EXACT_USABLE_FOR, SMALL_USABLE_FOR, USABLE_FOR
from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_formats.rest.operations import Job, Replica
from holdfast_formats.rest.retention import Preview, Verdict
from holdfast_service.wings.console import manifest_view
from holdfast_service.wings.console.ancestry import Ancestry, ancestry_of
from holdfast_service.wings.console.manifest_view import Stripe, TensorLine
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at, shown

router = page_router()

FILES_SHOWN = 50
JOBS_LOOKED_AT = 200
VERDICTS_UP_TO = 2000  # checkpoints of a run; of more, the verdict comes after the page
TENSORS_DRAWN = 100
EXTENTS_LISTED = 50


class DrawnTensor(NamedTuple):
    """A tensor on the map of its file."""

    line: TensorLine
    stripes: list[Stripe]


@router.get("/runs/{run}/checkpoints/{step}")
async def show_checkpoint(request: Request, api: Asked, run: str, step: str, why: bool = False) -> Response:
    """Facts, checks, copies and actions."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    replicas, verdict, jobs, beside, instead, cost = await asyncio.gather(
        shown(api.page(Replica, at(run, checkpoint.step, "replicas"))),
        shown(_verdict(api, run, checkpoint.step, why)),
        shown(api.page(Job, "/v1/jobs", run=run, limit=JOBS_LOOKED_AT)),
        _before(api, checkpoint),
        _instead(api, checkpoint),
        _cost(api, checkpoint),
    )
    ancestry = await shown(_ancestry(api, checkpoint))  # it reads the checkpoint, which the verdict would say
    return page(
        request,
        "checkpoint.html",
        run=run,
        made=checkpoint,
        usable_for=USABLE_FOR,
        small_usable_for=SMALL_USABLE_FOR,
        exact_usable_for=EXACT_USABLE_FOR,
        replicas=replicas,
        cost=cost,
        verdict=verdict,
        jobs=[job for job in jobs.value.items if job.step == checkpoint.step] if jobs.value else None,
        before=beside,
        ancestry=ancestry.value,
        instead=instead,
        export_kinds=EXPORT_KINDS,
        export_dtypes=tuple(FLOATS.values()),
    )


async def _cost(api: ViewerApi, checkpoint: bodies.CheckpointInfo) -> str:
    """What its save and its check asked of the bucket; empty if nothing, or if that is not known any more."""
    if not (checkpoint.check or {}).get("check_requests"):
        return ""
    run, step = checkpoint.run, checkpoint.step
    saves = await shown(api.page(bodies.Round, "/v1/rounds", run=run, state="committed", step_min=step, step_max=step))
    of = [one.measured for one in saves.value.items if one.attempt == checkpoint.attempt] if saves.value else []
    return costs.of_save(dict(of[0])) if of and of[0] else ""


@router.get("/runs/{run}/checkpoints/{step}/files")
async def show_files(request: Request, api: Asked, run: str, step: str, cursor: str | None = None) -> Response:
    """Files as they should be, and as they are on storage."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    files, node = await asyncio.gather(
        shown(api.page(bodies.File, at(run, checkpoint.step, "files"), cursor=cursor, limit=FILES_SHOWN)),
        shown(api.page(bodies.Node, "/v1/nodes")),
    )
    return page(
        request,
        "files.html",
        run=run,
        made=checkpoint,
        files=files,
        first=cursor is None,
        next=files.value.next if files.value else None,
        root=node.value.items[0].root if node.value and node.value.items else None,
    )


@router.get("/runs/{run}/checkpoints/{step}/map/{name}")
async def show_map(request: Request, api: Asked, run: str, step: str, name: str, first: int = 0) -> Response:
    """The map of one file from its first byte to its last: its tensors, and the ranks that held them in the save."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    held = await manifest_view.held(api, run, checkpoint.step)
    entry = held.manifest.file(name)
    if entry is None:
        raise NoSuchResource(f"the checkpoint has no file {name!r}", hint="see the list of files on the checkpoint page")
    lines = await asyncio.to_thread(held.of_file, name)
    part = lines[max(first, 0) : max(first, 0) + TENSORS_DRAWN]
    shades = manifest_view.numbered(line.entry.placement for line in lines)
    # If a file has more tensors than fit, the map shows the bytes of those that are listed.
    begin = part[0].entry.start if part else 0
    end = part[-1].entry.start + part[-1].entry.nbytes if part else entry.bytes
    moved = [line._replace(entry=_moved(line.entry, begin)) for line in part]
    drawn = [
        DrawnTensor(line, manifest_view.stripes(stripes, held.manifest.mesh, max(end - begin, 1), shades))
        for line, stripes in zip(part, moved, strict=True)
    ]
    return page(
        request,
        "map.html",
        run=run,
        made=checkpoint,
        file=entry,
        drawn=drawn,
        shades=shades,
        mesh=held.manifest.mesh,
        begin=begin,
        end=end,
        first=max(first, 0),
        total=len(lines),
        shown_at_once=TENSORS_DRAWN,
    )


def _tensor(
    group: Annotated[str, Query(max_length=64)], name: Annotated[str, Query(max_length=4096)], first: int = 0
) -> tuple[str, str, int]:
    return group, name, max(first, 0)


@router.get("/runs/{run}/checkpoints/{step}/extents")
async def show_extents(
    request: Request, api: Asked, run: str, step: str, asked: Annotated[tuple[str, str, int], Depends(_tensor)]
) -> Response:
    group, name, first = asked
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    held = await manifest_view.held(api, run, checkpoint.step)
    line = held.line(group, name)
    if line is None:
        raise NoSuchResource(f"the checkpoint has no tensor {name!r} in {group!r}", hint="see its list of tensors")
    return page(
        request,
        "extents.html",
        run=run,
        made=checkpoint,
        line=line,
        extents=line.entry.extents[first : first + EXTENTS_LISTED],
        first=first,
        shown_at_once=EXTENTS_LISTED,
        measured=(await manifest_view.statistics(api, held)).value,
    )


async def _verdict(api: ViewerApi, run: str, step: int, why: bool) -> Verdict | None:
    """The verdict on this step. It needs a verdict on the whole run, which takes a second for a large one; then the page
    does not wait, and `why` requests it.
    """
    if not why and (await api.get(bodies.Run, at(run))).checkpoints > VERDICTS_UP_TO:
        return None
    preview = await api.get(Preview, at(run) + "/retention", step=step)
    return next(iter(preview.verdicts), None)


async def _ancestry(api: ViewerApi, checkpoint: bodies.CheckpointInfo) -> Ancestry | None:
    return (
        await ancestry_of(api, checkpoint.run, checkpoint.step) if checkpoint.world == 1 else None
    )  # merges are made by one process


async def _instead(api: ViewerApi, checkpoint: bodies.CheckpointInfo) -> int | None:
    """The step to restore instead of a damaged or unhealthy one, if there is one."""
    if checkpoint.damage is None and checkpoint.healthy is not False:
        return None
    healthy = await shown(api.get(bodies.CheckpointInfo, at(checkpoint.run, "latest-healthy")))
    return None if healthy.value is None or healthy.value.step == checkpoint.step else healthy.value.step


async def _before(api: ViewerApi, checkpoint: bodies.CheckpointInfo) -> int | None:
    """The previous checkpoint's step, to compare with."""
    if checkpoint.step == 0:
        return None
    path = at(checkpoint.run) + "/checkpoints"
    older = await shown(api.page(bodies.CheckpointInfo, path, step_max=checkpoint.step - 1, limit=1))
    return older.value.items[0].step if older.value and older.value.items else None


def _moved(entry: TensorEntry, begin: int) -> TensorEntry:
    return TensorEntry(entry.dtype, entry.shape, entry.file, entry.start - begin, entry.extents, entry.placement)
