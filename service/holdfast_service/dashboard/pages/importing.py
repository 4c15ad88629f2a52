"""Import a checkpoint of another program: a form. Its dry run reports the conversion, and writes nothing."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.foreign.known_kinds import KINDS
from holdfast_formats.rest.operations import Job, JobRequest
from holdfast_service.dashboard.asking import Asked
from holdfast_service.dashboard.rendering import page, see
from holdfast_service.dashboard.routing import Form, Posted, page_router

router = page_router()
_TEXTS, _FLAGS = ("from", "kind", "program", "int16"), ("as_is", "assemble_flat", "dry_run")


@router.get("/import")
async def show_form(request: Request, _: Asked) -> Response:
    return page(request, "import.html", kinds=KINDS)


@router.post("/import")
async def submit(api: Asked, form: Posted) -> Response:
    """Submit the job, with `dry_run` one that writes nothing; its page shows the progress, and then the report."""
    answer = await api.ask("POST", "/v1/jobs", body=wanted(form))
    return see(f"/jobs/{Job.model_validate_json(answer.content).id}", "job")


def wanted(form: Form) -> JobRequest:
    """The form's job; `InvalidRequest` names a missing field."""
    run, step = form.text("run"), form.number("step")
    for name, value in (("from", form.text("from")), ("run", run), ("step", step)):
        if value in ("", None):
            raise InvalidRequest(f"the field {name!r} is empty", hint="go back and fill it in")
    arguments: dict[str, Any] = {name: form.text(name) for name in _TEXTS if form.text(name)}
    if (shards := form.number("shards")) is not None:
        arguments["shards"] = shards
    arguments |= {name: True for name in _FLAGS if form.text(name) == "yes"}
    return JobRequest(kind="import", run=run, step=step, arguments=arguments)
