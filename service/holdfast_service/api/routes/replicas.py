"""Routes: copies of checkpoints in other tiers, and another attempt to make them."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_formats.errors import InUse, NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica
from holdfast_formats.staging.messages import CopyAnswer
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import open_checkpoints
from holdfast_service.api.services import Wired
from holdfast_service.control.checkpoints import replicas

router = APIRouter(prefix="/v1", responses=problems.RESPONSES)


@router.get(
    "/runs/{run}/checkpoints/{step}/replicas",
    tags=["replicas"],
    dependencies=needs("read"),
    summary="Copies of a checkpoint in other tiers, sorted by tier",
)
def list_replicas(services: Wired, run: str, step: str) -> bodies.Page[Replica]:
    """One page with one item per tier. Copies in progress and failed copies are included, with their problem."""
    checkpoint = open_checkpoints.find(services, run, step)
    return bodies.Page(items=replicas.listed(services.control.catalog.database, checkpoint.run, checkpoint.step))


@router.get(
    "/runs/{run}/checkpoints/{step}/replicas/{tier}",
    tags=["replicas"],
    dependencies=needs("read"),
    summary="Whether a checkpoint was copied to a tier or replica, and read back there",
)
def get_copy(services: Wired, run: str, step: int, tier: str) -> CopyAnswer:
    """`why` says what is missing. 404 if there is no such tier: the error names those that there are."""
    return services.control.awaited_copies.of(run, step, tier)


@router.post(
    "/replicas/{tier}/retry",
    tags=["alerts"],
    dependencies=needs("admin", "all", act="replica-retried"),
    status_code=204,
    summary="Copy to a replica again, now",
)
def retry_replica(services: Wired, tier: str) -> None:
    """What could not be copied is tried at once, and not when its time has come. 404 if this daemon has no such replica, 409
    if another node copies to it.
    """
    retry = services.replicas.get(tier)
    if retry is None:
        raise NoSuchResource(f"this daemon has no replica {tier!r}", hint="`GET /v1/nodes` lists the replicas of each node")
    if not retry():
        raise InUse(
            f"another node copies to the replica {tier!r}",
            hint="send the request to the node that `GET /v1/nodes` names for it",
        )
