"""Replicas over the REST API. One function per route."""

from __future__ import annotations

from urllib.parse import quote

from holdfast.rest.api import Api, Step
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica


def of(api: Api, run: str, step: Step = "latest") -> list[Replica]:
    """The copies of a checkpoint in other tiers, by tier."""
    answer = api.request("GET", f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}/replicas")
    return api.parsed(answer.content, bodies.Page[Replica]).items
