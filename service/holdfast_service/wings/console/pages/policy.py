"""The retention of a run: the policy in a form, a preview with reasons, and only then the change (`If-Match`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.disk.compacting import RULES
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import Preview, RetentionPolicy, Verdict
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, filled, page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at, to

router = page_router()

VERDICTS_SHOWN, VERDICTS_FOLDED = 50, 450
BEST_ROWS_SPARE = 1
HOUR_S = 3600.0
Count = Annotated[int, Query(ge=0)]


class Applied(NamedTuple):
    """What goes by the policy that was just set: checkpoints, and their bytes."""

    checkpoints: int
    freed_bytes: int


@router.get("/runs/{run}/policy")
async def show_policy(request: Request, api: Asked, run: str, removed: Count = 0, freed: Count = 0) -> Response:
    """The policy in force, and its verdict on every checkpoint; `removed` and `freed` of the policy that was just set."""
    tag = await _tag(api, run)
    preview = await api.get(Preview, at(run) + "/retention")
    applied = Applied(removed, freed) if removed else None
    return await _page(request, api, run, tag, preview, in_force=preview, applied=applied)


@router.post("/runs/{run}/policy/preview")
async def preview_policy(request: Request, api: Asked, run: str, form: Posted) -> Response:
    """What the policy in the form would keep and remove, with reasons. Nothing changes."""
    policy = as_policy(form)
    tag = _stated_tag(form)
    answer = await api.request("PUT", at(run) + "/policy", body=policy, headers={"If-Match": tag}, dry_run="true")
    preview = Preview.model_validate_json(answer.content)
    now = await api.get(Preview, at(run) + "/retention")
    return await _page(request, api, run, tag, preview, in_force=now)


@router.post("/runs/{run}/policy")
async def put_policy(api: Asked, run: str, form: Posted) -> Response:
    """Set the previewed policy, unless it was changed meanwhile."""
    answer = await api.request("PUT", at(run) + "/policy", body=as_policy(form), headers={"If-Match": _stated_tag(form)})
    preview = Preview.model_validate_json(answer.content)
    gone = sum(not verdict.keep for verdict in preview.verdicts)
    return see(to(run) + "/policy", "policy", removed=str(gone), freed=str(preview.bytes_removed))


def as_policy(form: Form) -> RetentionPolicy:
    """The policy from the form's fields; `InvalidRequest` names an invalid field."""
    best = [
        {"metric": metric, "mode": mode, "count": count, "keep_unmeasured": unmeasured == "keep"}
        for metric, mode, count, unmeasured in zip(
            form.all("metric"), form.all("mode"), _counts(form), form.all("unmeasured"), strict=False
        )
        if metric
    ]
    fields: dict[str, Any] = {
        name: form.number(name) for name in ("last", "every_steps", "steps_apart", "keep_full", "optim_full")
    }
    fields["optim"] = form.text("optim") or None
    fields["every_seconds"] = _hours(form, "every_hours")
    fields["within_seconds"] = _hours(form, "within_hours")
    gigabytes = form.real("quota_gigabytes")
    fields["quota_bytes"] = None if gigabytes is None else round(gigabytes * 1e9)
    steps = [part for part in form.text("steps").replace(",", " ").split() if part]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in steps):
        raise InvalidRequest("steps: not whole numbers separated by spaces", hint="go back and change the field")
    return filled(RetentionPolicy, {**fields, "best": tuple(best), "steps": tuple(map(int, steps))})


def _counts(form: Form) -> list[int]:
    if not all(text.isascii() and text.isdigit() and len(text) < 20 for text in form.all("count") if text):
        raise InvalidRequest("count: not an integer", hint="go back and change the field")
    return [int(text or 1) for text in form.all("count")]


def _hours(form: Form, name: str) -> float | None:
    hours = form.real(name)
    return None if hours is None else hours * HOUR_S


def _stated_tag(form: Form) -> str:
    """The tag that the page came with."""
    tag = form.text("tag")
    if not (tag.isascii() and tag.isprintable()):
        raise InvalidRequest("tag: it does not come from this page", hint="open the page again")
    return tag


async def _tag(api: ViewerApi, run: str) -> str:
    """The value for `If-Match`. It is requested before the preview, so that the change detects a policy set in between."""
    return str((await api.request("GET", at(run) + "/policy")).headers["etag"])


async def _page(  # noqa: PLR0913 — one page, before and after a change
    request: Request,
    api: ViewerApi,
    run: str,
    tag: str,
    preview: Preview,
    *,
    in_force: Preview,
    applied: Applied | None = None,
) -> Response:
    """The form with the previewed policy. If that is the one in force, no change is offered."""
    newest = await api.page(bodies.CheckpointInfo, at(run) + "/checkpoints", limit=1)
    before = {verdict.step: _end(verdict) for verdict in in_force.verdicts}
    # Changes come first: a person has to agree to these.
    verdicts = sorted(preview.verdicts, key=lambda v: (not _is_new(v, before), _end(v), -v.step))
    return page(
        request,
        "policy.html",
        run=run,
        policy=preview.policy,
        tag=tag,
        applied=applied,
        preview=preview,
        proposed=preview is not in_force,
        verdicts=verdicts[:VERDICTS_SHOWN],
        folded=verdicts[VERDICTS_SHOWN:][:VERDICTS_FOLDED],
        rules=RULES,
        new={verdict.step for verdict in preview.verdicts if _is_new(verdict, before)},
        best=[*preview.policy.best, *[None] * BEST_ROWS_SPARE],
        metrics=sorted(newest.items[0].metrics) if newest.items else [],
    )


def _end(verdict: Verdict) -> tuple[bool, bool, bool]:
    """A checkpoint's treatment; untouched sorts last."""
    return verdict.keep, not verdict.thin, not verdict.compact


def _is_new(verdict: Verdict, before: Mapping[int, tuple[bool, bool, bool]]) -> bool:
    """Whether the policy in force would treat the checkpoint otherwise."""
    now = _end(verdict)
    return before.get(verdict.step, now) != now
