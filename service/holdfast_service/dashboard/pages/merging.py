"""Merge checkpoints by a recipe: a form. Its dry run reports the result, and writes nothing."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Job, JobRequest
from holdfast_formats.rest.recipes import average_of_last
from holdfast_service.dashboard.asking import Asked, ViewerApi, at
from holdfast_service.dashboard.rendering import page, see
from holdfast_service.dashboard.routing import Form, Posted, page_router

router = page_router()
CHECKPOINTS_LOOKED_AT = 10_000
DTYPES = ("float32", "bfloat16", "float16")


@router.get("/merge")
async def show_form(request: Request, _: Asked, run: str = "") -> Response:
    return page(request, "merge.html", run=run, dtypes=DTYPES)


@router.post("/merge")
async def submit(api: Asked, form: Posted) -> Response:
    """Submit the job, with `dry_run` one that writes nothing; its page shows the progress, and then the report."""
    run, step = form.text("run"), form.number("step")
    for name, value in (("run", run), ("step", step)):
        if value in ("", None):
            raise InvalidRequest(f"the field {name!r} is empty", hint="go back and fill it in")
    arguments: dict[str, object] = {"recipe": await _recipe(api, form)}
    if form.text("dry_run") == "yes":
        arguments["dry_run"] = True
    answer = await api.ask("POST", "/v1/jobs", body=JobRequest(kind="merge", run=run, step=step, arguments=arguments))
    return see(f"/jobs/{Job.model_validate_json(answer.content).id}", "job")


async def _recipe(api: ViewerApi, form: Form) -> str:
    """The pasted recipe, or one for the mean of a run's newest checkpoints."""
    recipe, averaged, count = form.text("recipe"), form.text("averaged"), form.number("last")
    if recipe and (averaged or count is not None):
        raise InvalidRequest("there is a recipe, and a run to average", hint="go back and give one of them")
    if recipe:
        return recipe.replace("\r\n", "\n") + "\n"
    if not averaged or not count:
        raise InvalidRequest("the field 'recipe' is empty", hint="go back and fill it in, or say which run to average")
    listed, _ = await api.walk(bodies.CheckpointInfo, at(averaged) + "/checkpoints", CHECKPOINTS_LOOKED_AT)
    return average_of_last(averaged, listed, count, form.text("dtype") or None)
