"""Bulk actions on checkpoints of a run: pin, unpin, label, or remove after a page with the freed bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import check_label
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, PagePart, ViewerApi, at, shown, to

router = page_router()

STEPS_MAX = 200
_DONE = {"pin": "pinned", "unpin": "unpinned", "label": "labelled", "remove": "removed", "removed": "removed"}
Act = Callable[[int], Awaitable[object]]


class MarkedStep(NamedTuple):
    """One of the checkpoints, and the reason if it was not changed."""

    step: int
    bytes: int
    refused: CheckpointError | None


@router.post("/runs/{run}/marks")
async def mark(request: Request, api: Asked, run: str, form: Posted) -> Response:
    """Apply the button's action to the ticked steps. Removals are confirmed first."""
    act, steps = form.text("act"), _steps(form)
    if act == "remove":
        return await _confirm(request, api, run, steps)
    done = await _each(steps, _how(api, run, act, form, len(steps)))
    refused = [one for one in done if one.refused is not None]
    if not refused:
        return see(f"{to(run)}", f"{_DONE[act]}-all")
    if len(refused) == len(done) == 1 and refused[0].refused is not None:
        raise refused[0].refused
    return page(request, "marks.html", run=run, act=_DONE[act], done=done, refused=refused, freed=None, shares=False)


def _steps(form: Form) -> list[int]:
    texts = [text for text in form.all("step") if text]
    if not texts:
        raise InvalidRequest("no checkpoint was ticked", hint="go back and tick the steps")
    if len(texts) > STEPS_MAX:
        raise LimitExceeded(f"at most {STEPS_MAX} checkpoints can be changed at once")
    if not all(text.isascii() and text.isdigit() and len(text) < 16 for text in texts):
        raise InvalidRequest("a step is a whole number", hint="go back and tick the steps")
    return sorted({int(text) for text in texts}, reverse=True)


def _how(api: ViewerApi, run: str, act: str, form: Form, count: int) -> Act:
    if act in ("pin", "unpin"):
        method = "PUT" if act == "pin" else "DELETE"
        return lambda step: api.request(method, at(run, step, "pin"))
    if act == "label":
        label = check_label(form.text("label"))
        return lambda step: api.request("PUT", at(run, step, "labels", label))
    if act == "removed":
        if form.number("confirm") != count:
            raise InvalidRequest(
                f"you typed {form.text('confirm')!r}, but {count} checkpoints would be removed",
                hint="go back and type the number of checkpoints",
            )
        return lambda step: api.request("DELETE", at(run, step))
    raise InvalidRequest(f"{act!r} is not an action for checkpoints", hint="go back and press a button")


async def _each(steps: Iterable[int], act: Act) -> list[MarkedStep]:
    """In turn: each removal changes what retention's rules allow next."""
    done = []
    for step in steps:
        result: PagePart[object] = await shown(act(step))
        done.append(MarkedStep(step, 0, result.error))
    return done


def _own_bytes(checkpoint: bodies.CheckpointInfo | None) -> int:
    """The bytes that no older checkpoint has."""
    return 0 if checkpoint is None else checkpoint.bytes - checkpoint.shared_bytes


async def _confirm(request: Request, api: ViewerApi, run: str, steps: list[int]) -> Response:
    """The confirmation: removals, freed bytes, and refused ones."""

    async def looked_at(step: int) -> MarkedStep:
        checkpoint = await shown(api.get(bodies.CheckpointInfo, at(run, step)))
        tried = await shown(api.request("DELETE", at(run, step), dry_run="true"))
        return MarkedStep(step, _own_bytes(checkpoint.value), checkpoint.error or tried.error)

    looked = await asyncio.gather(*map(looked_at, steps))
    listed = await api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=STEPS_MAX)
    shares = any(one.shared_bytes for one in listed.items)  # then bytes may pass to checkpoints that stay
    going = [one for one in looked if one.refused is None]
    freed = sum(one.bytes for one in going)
    refused = [one for one in looked if one.refused is not None]
    return page(request, "marks.html", run=run, act="remove", done=going, refused=refused, freed=freed, shares=shares)
