"""Routes: limits on the bytes of all runs of a team."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import Quota, QuotaRequest
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Viewer, Wired
from holdfast_service.control.access.tokens import check_pattern
from holdfast_service.control.database.visible import covers

router = APIRouter(prefix="/v1", tags=["access"], responses=problems.RESPONSES)
Pattern = Annotated[str, Path(max_length=128, description="a run's name, a prefix ending in *, or * for all")]


@router.get("/quotas", dependencies=needs("read"), summary="Quotas of teams, and how much of each is used")
def list_quotas(services: Wired, viewer: Viewer) -> bodies.Page[Quota]:
    """A token for some runs sees the quotas of which it sees all runs."""
    quotas = [quota for quota in services.team_quotas.usage() if covers(viewer.runs, quota.pattern)]
    return bodies.Page(items=quotas, next=None)


@router.put(
    "/quotas/{pattern}",
    dependencies=needs("admin", "all", act="quota-set"),
    summary="Set the quota, in bytes, of all runs that match a pattern",
)
def set_quota(services: Wired, pattern: Pattern, wanted: QuotaRequest) -> Quota:
    """It holds from the next save on: a save that does not fit is refused with `quota-exceeded`. Nothing is removed."""
    return services.team_quotas.set(check_pattern(pattern), wanted.quota_bytes)


@router.delete(
    "/quotas/{pattern}",
    dependencies=needs("admin", "all", act="quota-removed"),
    status_code=204,
    summary="Remove the quota of a pattern",
)
def remove_quota(services: Wired, pattern: Pattern) -> None:
    services.team_quotas.remove(pattern)
