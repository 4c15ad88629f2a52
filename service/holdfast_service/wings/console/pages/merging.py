"""Merge checkpoints by a recipe: a form. Its dry run reports the result, and writes nothing."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.jobs import MergeArguments, MergeJob
from holdfast_formats.rest.recipes import average_of_last
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, ViewerApi, at

router = page_router()
CHECKPOINTS_LOOKED_AT = 10_000
DTYPES = ("float32", "bfloat16", "float16")


@router.get("/merge")
async def show_form(request: Request, _: Asked, run: str = "") -> Response:
    return page(request, "merge.html", run=run, dtypes=DTYPES)


@router.post("/merge")
async def submit(api: Asked, form: Posted) -> Response:
    """Submit the job, with `dry_run` one that writes nothing; its page shows the progress, and then the report."""
    form.need("run", "step")
    named = {"run": form.text("run"), "step": form.number("step")}
    arguments = {**form.arguments(MergeArguments), "recipe": await _recipe(api, form)}
    return see(await api.submit(MergeJob.model_validate({**named, "arguments": arguments})), "job")


async def _recipe(api: ViewerApi, form: Form) -> str:
    """The pasted recipe, or one for the mean of a run's newest checkpoints."""
    recipe, averaged, count = form.text("recipe"), form.text("averaged"), form.number("last")
    if recipe and (averaged or count is not None):
        raise InvalidRequest("both a recipe and a run to average were given", hint="go back and give only one of them")
    if recipe:
        return recipe.replace("\r\n", "\n") + "\n"
    if not averaged or not count:
        raise InvalidRequest("the field 'recipe' is empty", hint="go back and fill it in, or choose the run to average")
    listed, _ = await api.walk(bodies.CheckpointInfo, at(averaged) + "/checkpoints", CHECKPOINTS_LOOKED_AT)
    return average_of_last(averaged, listed, count, form.text("dtype") or None)
