"""One module per page, or for a few related ones."""

from fastapi import APIRouter

from holdfast_service.dashboard import static

from . import (
    actions,
    checkpoint,
    compare,
    downloads,
    events,
    find,
    health,
    importing,
    jobs,
    marks,
    nodes,
    overview,
    policy,
    reference,
    restoring,
    run,
    sign_in,
    tensors,
    tokens,
)

router = APIRouter(include_in_schema=False)
for _page in (
    overview,
    run,
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
    marks,
    events,
    find,
    downloads,
    tokens,
    reference,
    sign_in,
    static,
):
    router.include_router(_page.router)

__all__ = ["router"]
