"""Creates the FastAPI application: routes and problems, no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter, FastAPI
from starlette.datastructures import State

from holdfast_service.api import problems, routes
from holdfast_service.api.access.admission import ByteBudget, StallLimit
from holdfast_service.api.access.audit import AuditTrail
from holdfast_service.api.access.authorization import Declarations
from holdfast_service.api.access.content_policy import ContentPolicy
from holdfast_service.api.access.middleware import AccessMiddleware
from holdfast_service.api.content.open_checkpoints import OpenedCheckpoints
from holdfast_service.api.content.shard_plans import PlannedShards
from holdfast_service.api.content.shard_streams import ShardStreams
from holdfast_service.api.read_protection import ReadProtection
from holdfast_service.api.request_metrics import Observed, Requests
from holdfast_service.api.routes import events, uploads
from holdfast_service.wing import RunningWing, installed

from .metrics import Collected
from .services import Services

__all__ = ["RestApi", "Services"]

_DESCRIPTION = (
    "Committed checkpoints of training runs: lists, metadata and verified bytes.\n\nErrors are problems (RFC 9457) "
    "with `code`, `retryable` and `hint`. Lists are paged: pass `next` back as `cursor`."
)
_TAGS = [
    {"name": "runs", "description": "Training runs and their committed checkpoints"},
    {"name": "alerts", "description": "What needs attention, what fixes it, and acknowledgements"},
    {"name": "retention", "description": "Retention: policy, pins, labels and removal, with reasons"},
    {"name": "replicas", "description": "Copies of a checkpoint in other storage tiers"},
    {"name": "contents", "description": "Manifest, tensors and files of a checkpoint; files support a single byte range"},
    {
        "name": "shards",
        "description": "One rank's shard in any parallel layout: a safetensors file, or the plan to read it from storage",
    },
    {"name": "uploads", "description": "Saves from ranks that share no memory with the daemon: slots uploaded in chunks"},
    {"name": "jobs", "description": "Background jobs: submit, watch, cancel"},
    {"name": "events", "description": "Events, as a live stream or in pages"},
    {"name": "tokens", "description": "Bearer tokens: their scopes and runs"},
    {"name": "notifications", "description": "Where the daemon sends alerts, and with what result"},
    {"name": "watched", "description": "Other daemons that this one watches, and their runs"},
    {"name": "access", "description": "The caller, the audit log, and how much a team may store"},
    {"name": "operations", "description": "Saves, nodes, health and metrics"},
]


def _routers(package: str) -> list[APIRouter]:
    """Those of a package, each module of which has a router."""
    modules = iter_modules(import_module(package).__path__)
    return [import_module(f"{package}.{module.name}").router for module in modules]


ROUTERS = [
    router for package in (routes.__name__, *(w.routes for w in installed() if w.routes)) for router in _routers(package)
]
# For every app the same: `include_router` in an app would build each route again, which takes longer than all else there.
_ROUTES = [route for router in ROUTERS for route in router.routes]


class RestApi(FastAPI):
    """The REST API over these services and the running parts of wings; every app has its own state."""

    def __init__(self, services: Services, wings: Mapping[str, RunningWing]) -> None:
        super().__init__(
            title="Holdfast",
            version=services.version,
            description=_DESCRIPTION,
            openapi_tags=_TAGS,
            docs_url=None,  # both load scripts of a CDN, in the origin of the admin's cookie
            redoc_url=None,
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
            routes=[*_ROUTES],
            exception_handlers=problems.HANDLERS,
        )
        access, requests = services.access, Requests()
        declarations, trail = Declarations(self.routes), AuditTrail(services.audit)
        self.state = State(
            {
                "services": services,
                "wings": wings,
                "behind_tls": access.tls,
                "logout": access.logins.logout if access.logins is not None else None,
                "trail": trail,
                "opened": OpenedCheckpoints(services.control.records, services.control.rotation.readers),
                "planned": PlannedShards(services.control.records),
                "collected": Collected(services, wings.values(), requests),
                "streams": ShardStreams(services.control.records),
                "event_streams": events.EventStreams(services.control.events),
                "uploads": ByteBudget(uploads.UPLOAD_BYTES_MAX),
                "declarations": declarations,
            }
        )
        self.add_middleware(StallLimit)
        self.add_middleware(ReadProtection)
        # The last one added is the outermost. What is refused is measured as well.
        self.add_middleware(AccessMiddleware, declarations, access, services.tokens, services.refusals, trail)
        self.add_middleware(Observed, requests)
        self.add_middleware(ContentPolicy)
