"""Routes: saves, nodes, health and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.responses import Response

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, StorageFailed
from holdfast_formats.rest import bodies
from holdfast_service.api import problems
from holdfast_service.api.door.needs import OPEN, READS
from holdfast_service.api.services import Cursor, Limit, Services, Since, StepMax, StepMin, Viewer, Wired
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.catalog.listing import Within
from holdfast_service.control.cluster.membership import ClusterNode
from holdfast_service.control.database.visible import sees_all

router = APIRouter(tags=["operations"], responses=problems.RESPONSES)
RoundState = Literal["open", "sealed", "committed", "aborted", "dropped"]


@router.get("/v1/rounds", dependencies=READS, summary="Saves, newest first")
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
    return services.catalog.rounds(run, state, cursor, limit, Within(step_min, step_max, since))


@router.get("/v1/nodes", dependencies=READS, summary="Daemons that write to this catalog")
def list_nodes(services: Wired, viewer: Viewer) -> bodies.Page[bodies.Node]:
    """Process and root are shown only to tokens for all runs; the socket also to tokens that may save."""
    here = _Told(services.node(), services.held(), sum(n for run, n in services.ranks().items() if viewer.sees(run)))
    try:
        members = services.members()
    except CatalogUnavailable:  # this node says so of itself
        members = ()
    told = [here]
    if members:
        crews = services.crews()
        told = [here if m.name == here.node.name else _Told.of(m, crews.get(m.name, 0)) for m in members]
        told = [one._replace(node=_as_member(one.node, m)) for one, m in zip(told, members, strict=True)]
    return bodies.Page(items=[one.node if viewer.sees_all else _of_own_runs(one, viewer) for one in told])


class _Told(NamedTuple):
    """What a node says of itself: the bytes of its arena by run, and how many ranks of visible runs are connected to it."""

    node: bodies.Node
    held: Mapping[str, int]
    ranks: int

    @classmethod
    def of(cls, member: ClusterNode, ranks: int) -> _Told:
        about = {name: member.about[name] for name in bodies.Node.model_fields if name in member.about}
        return cls(bodies.Node(**about), member.about.get("held", {}), ranks)


def _as_member(node: bodies.Node, member: ClusterNode) -> bodies.Node:
    return node.model_copy(update={"live": member.live, "lease_s": round(member.lease_s, 1), "duties": list(member.duties)})


def _of_own_runs(said: _Told, viewer: Principal) -> bodies.Node:
    node = said.node
    told: dict[str, Any] = {
        "pid": None,
        "root": None,
        "arena_bytes": sum(size for run, size in said.held.items() if viewer.sees(run)),
        "memory": [one for one in node.memory if viewer.sees(one.run)],
        "ranks": said.ranks,
        "catalog": "the catalog does not answer; saves continue" if node.catalog else None,
    }
    if not viewer.may("write"):
        told |= {"socket": None, "socket_id": None}
    return node.model_copy(update=told)


@router.get("/healthz", dependencies=OPEN, summary="Liveness; `degraded` while the catalog does not answer")
async def get_health(services: Wired, viewer: Viewer) -> bodies.Health:
    """The version is shown only with scope `read`, the root only to tokens for all runs. The answer waits for
    nothing.
    """
    away = services.book is not None and services.book.trouble is not None
    return _health("degraded" if away else "ok", services, viewer)


@router.get("/readyz", dependencies=OPEN, summary="Readiness: catalog and storage answer; otherwise a 5xx problem")
def get_readiness(services: Wired, viewer: Viewer) -> bodies.Health:
    try:
        services.catalog.round_counts()
        services.tier.free_bytes()
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
    root = services.root if viewer.sees_all else None
    return bodies.Health(status=status, version=services.version, root=root)


@router.get("/metrics", dependencies=READS, response_class=Response, summary="Prometheus metrics, computed at the scrape")
def get_metrics(request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(request.app.state.collected)
    if sees_all():
        ProcessCollector(registry=registry)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
