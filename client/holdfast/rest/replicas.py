"""Replicas over the REST API. One function per route."""

from __future__ import annotations

from urllib.parse import quote

from holdfast.rest.api import Api, Step
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica
from holdfast_formats.staging.messages import CopyAnswer


def of(api: Api, run: str, step: Step = "latest") -> list[Replica]:
    """The copies of a checkpoint in other tiers, by tier."""
    answer = api.request("GET", f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}/replicas")
    return api.parsed(answer.content, bodies.Page[Replica]).items


def copied(api: Api, run: str, step: int, tier: str) -> CopyAnswer:
    """Whether a checkpoint is in a tier; `NoSuchResource`, with the names of those that there are, for another name."""
    path = f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}/replicas/{quote(tier, safe='')}"
    return api.get(path, CopyAnswer)
