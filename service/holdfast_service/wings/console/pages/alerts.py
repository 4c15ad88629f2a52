"""Actions on alerts: acknowledge, snooze, undo that, and repair. Each is a form that returns to its page."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import VerifyArguments, VerifyJob
from holdfast_formats.rest.measurements import AcknowledgeRequest
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.wings.console.rendering import see
from holdfast_service.wings.console.routing import Form, Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at, to

router = page_router()

SNOOZE_S = 3600.0
QUOTA_STEP_BYTES = 10**6  # quotas are raised to whole megabytes


@router.post("/runs/{run}/alerts/{code}")
async def answer_alert(api: Asked, run: str, code: str, form: Posted) -> Response:
    """Acknowledge an alert of a run, snooze it, or take that back."""
    answer = await _answer(api, at(run) + f"/alerts/{_part(code)}/acknowledgement", form, subject=form.text("subject"))
    return see(to(run) if form.text("back") == "run" else "/", answer)


@router.post("/alerts/{code}/{subject}")
async def answer_other(api: Asked, code: str, subject: str, form: Posted) -> Response:
    """The same for an alert of a node or a replica; or copy to the replica again."""
    if form.text("do") == "retry":
        await api.request("POST", f"/v1/replicas/{_part(subject)}/retry")
        return see("/", "retried")
    return see("/", await _answer(api, f"/v1/alerts/{_part(code)}/{_part(subject)}/acknowledgement", form))


@router.post("/runs/{run}/mend")
async def mend(api: Asked, run: str, form: Posted) -> Response:
    """Do what repairs an alert of a run."""
    remedy, step = form.text("remedy"), form.number("step")
    if remedy == "raise-quota":
        await _raise_quota(api, run)
        return see(f"{to(run)}/policy", "quota")
    if remedy in ("verify", "repair") and step is not None:
        wanted = VerifyJob(run=run, step=step, arguments=VerifyArguments(repair=remedy == "repair"))
        return see(await api.submit(wanted), "job")
    if remedy == "retry-replicas" and form.text("subject"):
        await api.request("POST", f"/v1/replicas/{_part(form.text('subject'))}/retry")
        return see(to(run), "retried")
    raise InvalidRequest(f"{remedy!r} does not fix an alert", hint="go back and load the page again")


async def _answer(api: ViewerApi, path: str, form: Form, **params: Any) -> str:
    do = form.text("do")
    if do == "take-back":
        await api.request("DELETE", path, **params)
        return "alert-back"
    if do not in ("acknowledge", "snooze"):
        raise InvalidRequest(f"{do!r} is not an action for an alert", hint="go back and load the page again")
    body = AcknowledgeRequest(for_s=SNOOZE_S if do == "snooze" else None)
    await api.request("PUT", path, body=body, **params)
    return "snoozed" if do == "snooze" else "acknowledged"


async def _raise_quota(api: ViewerApi, run: str) -> None:
    """Raise it by half, unless the policy changes at the same moment."""
    answer = await api.request("GET", at(run) + "/policy")
    policy = RetentionPolicy.model_validate_json(answer.content)
    if policy.quota_bytes is None:
        raise InvalidRequest(f"{run} has no quota", hint="it was removed in the meantime: go back and load the page again")
    raised = math.ceil(policy.quota_bytes * 1.5 / QUOTA_STEP_BYTES) * QUOTA_STEP_BYTES
    await api.request(
        "PUT",
        at(run) + "/policy",
        body=policy.model_copy(update={"quota_bytes": raised}),
        headers={"If-Match": answer.headers["etag"]},
    )


def _part(text: str) -> str:
    return quote(text, safe="")
