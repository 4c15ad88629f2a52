"""Routes: copies of checkpoints in other tiers."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import open_checkpoints
from holdfast_service.api.services import Wired
from holdfast_service.control.checkpoints import replicas

router = APIRouter(prefix="/v1", tags=["replicas"], responses=problems.RESPONSES)


@router.get(
    "/runs/{run}/checkpoints/{step}/replicas",
    dependencies=needs("read"),
    summary="Copies of a checkpoint in other tiers, sorted by tier",
)
def list_replicas(services: Wired, run: str, step: str) -> bodies.Page[Replica]:
    """One page with one item per tier. Copies in progress and failed copies are included, with their problem."""
    checkpoint = open_checkpoints.find(services, run, step)
    return bodies.Page(items=replicas.listed(services.catalog.database, checkpoint.run, checkpoint.step))
