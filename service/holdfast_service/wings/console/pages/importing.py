"""Import a checkpoint of another program: a form. Its dry run reports the conversion, and writes nothing."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.rest.jobs import IMPORT_KINDS, ImportArguments, ImportJob
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked

router = page_router()


@router.get("/import")
async def show_form(request: Request, _: Asked) -> Response:
    return page(request, "import.html", kinds=IMPORT_KINDS)


@router.post("/import")
async def submit(api: Asked, form: Posted) -> Response:
    """Submit the job, with `dry_run` one that writes nothing; its page shows the progress, and then the report."""
    form.need("from", "run", "step")
    named = {"run": form.text("run"), "step": form.number("step")}
    return see(await api.submit(ImportJob.model_validate({**named, "arguments": form.arguments(ImportArguments)})), "job")
