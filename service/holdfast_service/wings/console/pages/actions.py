"""Actions on a checkpoint: each is a form, with a confirmation if it cannot be undone, that returns to the checkpoint's
page.
"""

from __future__ import annotations

from typing import get_args

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import ExportArguments, parse
from holdfast_formats.rest.retention import Force, check_label
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, at, to

router = page_router()
_CHECKPOINT = "/runs/{run}/checkpoints/{step}"
_FORCES: tuple[str, ...] = get_args(Force)


@router.post(f"{_CHECKPOINT}/pin")
async def set_pin(api: Asked, run: str, step: int, form: Posted) -> Response:
    """Pin it, or with `pinned=no` remove the pin."""
    unpin = form.text("pinned") == "no"
    await api.request("DELETE" if unpin else "PUT", at(run, step, "pin"))
    return see(_back(form, run, step), "unpinned" if unpin else "pinned")


@router.post(f"{_CHECKPOINT}/labels")
async def add_label(api: Asked, run: str, step: int, form: Posted) -> Response:
    label = check_label(form.text("label"))
    await api.request("PUT", at(run, step, "labels", label))
    return see(to(run, step), "labelled")


@router.post(f"{_CHECKPOINT}/labels/{{label}}/remove")
async def remove_label(api: Asked, run: str, step: int, label: str, _: Posted) -> Response:
    await api.request("DELETE", at(run, step, "labels", check_label(label)))
    return see(to(run, step), "unlabelled")


@router.get(f"{_CHECKPOINT}/remove")
async def confirm_removal(request: Request, api: Asked, run: str, step: int) -> Response:
    """Show what would be removed, or why that is refused, before anything happens."""
    checkpoint = await api.get(bodies.CheckpointInfo, at(run, step))
    refused: CheckpointError | None = None
    try:
        await api.request("DELETE", at(run, step), dry_run="true")
    except CheckpointError as error:
        refused = error
    return page(request, "remove.html", run=run, made=checkpoint, refused=refused, forces=_FORCES)


@router.post(f"{_CHECKPOINT}/remove")
async def remove(api: Asked, run: str, step: int, form: Posted) -> Response:
    """Remove it, if the step was typed once more."""
    if form.number("confirm") != step:
        raise InvalidRequest(
            f"you typed step {form.text('confirm')!r}, but the checkpoint is step {step}", hint="go back and type the step"
        )
    await api.request("DELETE", at(run, step), force=form.text("force"))
    return see(to(run), "removed")


@router.post(f"{_CHECKPOINT}/jobs")
async def submit(api: Asked, run: str, step: int, form: Posted) -> Response:
    """Submit a job that verifies, replicates or exports it; the page of jobs shows the progress."""
    kind = form.text("kind")
    if kind not in ("verify", "export"):
        raise InvalidRequest(f"{kind!r} jobs cannot be submitted here for a single checkpoint")
    arguments = form.arguments(ExportArguments) if kind == "export" else {}
    return see(await api.submit(parse({"kind": kind, "run": run, "step": step, "arguments": arguments})), "job")


def _back(form: Form, run: str, step: int) -> str:
    return to(run) if form.text("back") == "run" else to(run, step)
