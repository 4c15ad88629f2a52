"""The FastAPI application: routes, problems, and nothing that decides."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from . import files, operations, pages, problems, retention, runs, shards, uploads
from .contents import OpenedCheckpoints
from .planned import PlannedShards
from .reading import HeldWhileSending
from .services import Services
from .stalls import StallLimit
from .streams import Streams

__all__ = ["Services", "create_app"]

_DESCRIPTION = """Committed checkpoints of training runs: what there is, and its proven bytes.

Errors are problems (RFC 9457) with `code`, `retryable` and `hint`. Lists come in pages: pass `next` back as `cursor`."""
_TAGS = [
    {"name": "runs", "description": "Training runs and their committed checkpoints"},
    {"name": "retention", "description": "What a run keeps and why: policy, pins, labels, removal"},
    {"name": "contents", "description": "Manifest, tensors and files of a checkpoint; files take single ranges"},
    {
        "name": "shards",
        "description": "What a rank of any layout holds: a safetensors file, or the plan to read it from storage",
    },
    {"name": "uploads", "description": "Saves of ranks that share no memory with the daemon: slots brought in chunks"},
    {"name": "operations", "description": "Rounds under way, nodes, health and metrics"},
]


def create_app(services: Services) -> FastAPI:
    """The REST API over these services; every app has its own state."""
    app = FastAPI(
        title="Holdfast",
        version=services.version,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.services = services
    app.state.opened = OpenedCheckpoints(services.tier, services.rotation.readers)
    app.state.planned = PlannedShards(services.tier)
    app.state.streams = Streams(services.tier)
    app.state.chunks = asyncio.Semaphore(uploads.CHUNKS_MAX)
    for room in (runs, retention, files, shards, uploads, operations, pages):
        app.include_router(room.router)
    problems.install(app)
    app.add_middleware(StallLimit)
    app.add_middleware(HeldWhileSending)
    return app
