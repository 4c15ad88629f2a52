"""Routes: retention policy (changed with If-Match), previews, pins, labels and removal."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import JSONResponse, Response

from holdfast_formats.errors import PreconditionRequired
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Force, Preview, RetentionPolicy, check_label
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.access.dry_run import DryRun
from holdfast_service.api.content import delivery
from holdfast_service.api.services import Wired
from holdfast_service.control.checkpoints import run_files

_CHECKPOINT = "/runs/{run}/checkpoints/{step}"

router = APIRouter(prefix="/v1", tags=["retention"], responses=problems.RESPONSES)
IfMatch = Annotated[str | None, Header(description="the ETag of the policy that you read; required for a change")]
IfNoneMatch = Annotated[str | None, Header(description="the ETag of the policy as last read")]
OnlyStep = Annotated[int | None, Query(ge=0, description="only the verdict on this step; totals cover all steps")]
Forced = Annotated[
    Force | None, Query(description="remove it even if it is the newest verified or the newest healthy checkpoint")
]


@router.get(
    "/runs/{run}/policy",
    dependencies=needs("read"),
    summary="The current retention policy",
    response_model=RetentionPolicy,
)
def get_policy(services: Wired, run: str, if_none_match: IfNoneMatch = None) -> Response:
    """Send its ETag as `If-Match` to change the policy. Until one is set, it is the trainer's `keep_last`."""
    file = services.control.rotation.file(run)
    if delivery.not_modified(if_none_match, file.etag):
        return Response(status_code=304, headers={"ETag": file.etag})
    return JSONResponse(file.in_force.model_dump(), headers={"ETag": file.etag})


@router.put(
    "/runs/{run}/policy",
    dependencies=needs("admin", act="policy-set"),
    summary="Set the retention policy; returns what it keeps and removes",
    response_model=Preview,
)
def put_policy(services: Wired, run: str, policy: RetentionPolicy, dry_run: DryRun, if_match: IfMatch = None) -> Response:
    """428 without `If-Match`, 412 if the policy has changed since. `dry_run` changes nothing and needs no
    `If-Match`.
    """
    rotation = services.control.rotation
    if dry_run:
        file = rotation.file(run)
        if if_match is not None:
            run_files.check_etag(file, if_match)
        return JSONResponse(rotation.verdicts.preview(run, policy).model_dump(), headers={"ETag": file.etag})
    if if_match is None:
        raise PreconditionRequired(
            f"changing the policy of {run} needs If-Match",
            hint=f"read GET /v1/runs/{run}/policy and send its ETag",
        )
    preview = rotation.verdicts.preview(run, policy)
    file = rotation.set_policy(run, policy, if_match)
    return JSONResponse(preview.model_dump(), headers={"ETag": file.etag})


@router.get(
    "/runs/{run}/retention",
    dependencies=needs("read"),
    summary="What the retention policy keeps and removes, with reasons",
)
def get_retention(services: Wired, run: str, step: OnlyStep = None) -> Preview:
    """All checkpoints of the run in one document, because their verdicts depend on each other."""
    return services.control.rotation.verdicts.preview(run, step=step)


@router.put(
    f"{_CHECKPOINT}/pin",
    dependencies=needs("write", act="pin-set"),
    status_code=204,
    summary="Pin a checkpoint, which protects it from removal",
)
def put_pin(services: Wired, run: str, step: int) -> None:
    services.control.rotation.mark(run, step, lambda file: run_files.pinned(file, step))


@router.delete(
    f"{_CHECKPOINT}/pin",
    dependencies=needs("write", act="pin-removed"),
    status_code=204,
    summary="Unpin a checkpoint",
)
def delete_pin(services: Wired, run: str, step: int) -> None:
    services.control.rotation.unmark(run, lambda file: run_files.unpinned(file, step))


@router.put(
    f"{_CHECKPOINT}/labels/{{label}}",
    dependencies=needs("write", act="label-set"),
    status_code=204,
    summary="Label a checkpoint, which protects it from removal",
)
def put_label(services: Wired, run: str, step: int, label: str) -> None:
    check_label(label)
    services.control.rotation.mark(run, step, lambda file: run_files.labelled(file, step, label))


@router.delete(
    f"{_CHECKPOINT}/labels/{{label}}",
    dependencies=needs("write", act="label-removed"),
    status_code=204,
    summary="Remove a label",
)
def delete_label(services: Wired, run: str, step: int, label: str) -> None:
    services.control.rotation.unmark(run, lambda file: run_files.unlabelled(file, step, label))


@router.delete(
    _CHECKPOINT,
    dependencies=needs("admin", act="checkpoint-removed"),
    status_code=204,
    summary="Remove a checkpoint",
    responses={200: {"model": bodies.CheckpointInfo, "description": "With `dry_run`: what would be removed"}},
)
def remove_checkpoint(services: Wired, run: str, step: int, dry_run: DryRun, force: Forced = None) -> Response:
    """409 if it is pinned, labelled, being read, or the newest verified or healthy one without a matching `force`."""
    newest, healthy = force == "newest-verified", force == "newest-healthy"
    removed = services.control.rotation.remove(run, step, newest, dry_run, healthy)
    return JSONResponse(removed.model_dump()) if dry_run else Response(status_code=204)
