"""One module per page, or for a few related ones."""

from fastapi import APIRouter

from holdfast_service.dashboard import static

from . import (
    actions,
    alerts,
    checkpoint,
    compare,
    events,
    health,
    importing,
    jobs,
    nodes,
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

router = APIRouter(include_in_schema=False)
for _page in (
    overview,
    alerts,
    run,
    runs_compared,
    policy,
    compare,
    checkpoint,
    tensors,
    health,
    restoring,
    actions,
    nodes,
    importing,
    jobs,
    events,
    tokens,
    reference,
    sign_in,
    static,
):
    router.include_router(_page.router)

__all__ = ["router"]
