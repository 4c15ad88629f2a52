"""One module per page, or for a few related ones."""

from fastapi import APIRouter

from holdfast_service.dashboard import static

from . import (
    actions,
    alerts,
    audit,
    checkpoint,
    compare,
    daemons,
    downloads,
    events,
    find,
    health,
    importing,
    jobs,
    merging,
    nodes,
    notifications,
    overview,
    policy,
    reference,
    restoring,
    run,
    runs_compared,
    sign_in,
    tensors,
    tokens,
)
from .run_care import life, marks, team_quotas, trash

router = APIRouter(include_in_schema=False)
for _page in (
    overview,
    alerts,
    run,
    life,
    trash,
    runs_compared,
    policy,
    compare,
    checkpoint,
    tensors,
    health,
    restoring,
    actions,
    nodes,
    daemons,
    importing,
    merging,
    jobs,
    marks,
    events,
    notifications,
    team_quotas,
    audit,
    find,
    downloads,
    tokens,
    reference,
    sign_in,
    static,
):
    router.include_router(_page.router)

__all__ = ["router"]
