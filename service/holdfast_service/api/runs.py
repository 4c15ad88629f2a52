"""Routes: runs and their checkpoints."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_formats import rest

from . import contents, problems
from .services import Cursor, Limit, Wired

router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)


@router.get("/runs", summary="Runs, by name")
def list_runs(services: Wired, cursor: Cursor = None, limit: Limit = 100) -> rest.Page[rest.Run]:
    return services.catalog.runs(cursor, limit)


@router.get("/runs/{run}", summary="One run")
def get_run(services: Wired, run: str) -> rest.Run:
    return services.catalog.run(run)


@router.get("/runs/{run}/checkpoints", summary="A run's committed checkpoints, newest step first")
def list_checkpoints(services: Wired, run: str, cursor: Cursor = None, limit: Limit = 100) -> rest.Page[rest.Checkpoint]:
    services.catalog.run(run)
    return services.catalog.checkpoints(run, cursor, limit)


@router.get("/runs/{run}/checkpoints/{step}", summary="One checkpoint, by step or as `latest`")
def get_checkpoint(services: Wired, run: str, step: str) -> rest.Checkpoint:
    return contents.find(services, run, step)
