"""Routes: saves, health and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.responses import Response

from holdfast_formats.errors import CheckpointError, StorageFailed
from holdfast_formats.rest import bodies
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Services, Since, StepMax, StepMin, Viewer, Wired
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.catalog.listing import Within
from holdfast_service.control.database.visible import sees_all

router = APIRouter(tags=["operations"], responses=problems.RESPONSES)
RoundState = Literal["open", "sealed", "committed", "aborted", "dropped"]


@router.get("/v1/rounds", dependencies=needs("read"), summary="Saves, newest first")
def list_rounds(  # noqa: PLR0913 — one a filter
    services: Wired,
    run: Annotated[str | None, Query(description="only saves of this run")] = None,
    state: Annotated[RoundState | None, Query(description="only saves in this state")] = None,
    step_min: StepMin = None,
    step_max: StepMax = None,
    since: Since = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[bodies.Round]:
    """All given filters apply together; `since` filters by start time."""
    return services.control.catalog.rounds.page(run, state, cursor, limit, Within(step_min, step_max, since))


@router.get("/healthz", dependencies=needs(None, "health"), summary="Liveness; `degraded` while the catalog does not answer")
async def get_health(services: Wired, viewer: Viewer) -> bodies.Health:
    """The version is shown only with scope `read`, the root only to tokens for all runs. The answer waits for
    nothing.
    """
    away = services.control.record_queue.trouble is not None
    return _health("degraded" if away else "ok", services, viewer)


@router.get(
    "/readyz", dependencies=needs(None, "health"), summary="Readiness: catalog and storage answer; otherwise a 5xx problem"
)
def get_readiness(services: Wired, viewer: Viewer) -> bodies.Health:
    try:
        services.control.catalog.rounds.counts()
        services.control.store.free_bytes()
    except CheckpointError as error:
        if viewer.known and viewer.sees_all:
            raise
        raise StorageFailed(
            "catalog or storage does not answer", hint="see the log; a token for all runs sees the details here"
        ) from error
    return _health("ready", services, viewer)


def _health(status: str, services: Services, viewer: Principal) -> bodies.Health:
    if not viewer.known:
        return bodies.Health(status=status)
    root = services.root.label if viewer.sees_all else None
    return bodies.Health(status=status, version=services.version, root=root)


@router.get(
    "/metrics", dependencies=needs("read"), response_class=Response, summary="Prometheus metrics, computed at the scrape"
)
def get_metrics(request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(request.app.state.collected)
    if sees_all():
        ProcessCollector(registry=registry)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
