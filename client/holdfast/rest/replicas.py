"""Replicas over the REST API. One function per route."""

from __future__ import annotations

from urllib.parse import quote

from pydantic import ValidationError

from holdfast.rest.api import Api, Step
from holdfast_formats.errors import StorageFailed
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica


def of(api: Api, run: str, step: Step = "latest") -> list[Replica]:
    """The copies of a checkpoint in other tiers, by tier."""
    answer = api.request("GET", f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}/replicas")
    try:
        return bodies.Page[Replica].model_validate_json(answer.content).items
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        hint = "check that it is a Holdfast service of the same version"
        raise StorageFailed(f"{answer.url} sent an invalid answer: {first}", hint=hint) from error
