"""Routes: delete a whole run, list the trash, restore a run, empty the trash."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.rest.runs import RenamedRun, Trash, TrashedRun
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.access.dry_run import DryRun
from holdfast_service.api.services import Viewer, Wired
from holdfast_service.daemon.saving import run_deletion

router = APIRouter(prefix="/v1", tags=["retention"], responses=problems.RESPONSES)
Marked = Annotated[bool, Query(description="delete it even if some of its checkpoints are pinned or labelled")]
Entry = Annotated[
    str | None, Query(max_length=200, description="name of an entry in the trash; by default the newest, or all")
]


@router.delete("/runs/{run}", dependencies=needs("admin", act="run-deleted"), summary="Delete a run: move it to the trash")
def delete_run(services: Wired, run: str, dry_run: DryRun, marked: Marked = False) -> TrashedRun:
    """409 while its ranks are connected, something of it is being saved or read, a job works on it, or a link leads to it.
    Copies in replicas are removed.
    """
    return run_deletion.delete_run(
        services.control.trash, services.saver, services.arena, run, marked=marked, dry_run=dry_run
    )


@router.post(
    "/runs/{run}/rename",
    dependencies=needs("admin", act="run-renamed"),
    summary="Rename a run; returns it as it was",
)
def rename_run(
    services: Wired,
    viewer: Viewer,
    run: str,
    dry_run: DryRun,
    to: Annotated[str, Query(max_length=128, description="the new name")],
) -> RenamedRun:
    """409 while the run is in use (see `DELETE`), or if there is a run of the new name. Its checkpoints get new manifests,
    and the run of the old name goes to the trash. Damaged checkpoints go along, and are named.
    """
    viewer.require_run(to)
    return run_deletion.rename_run(services.control.renaming, services.saver, services.arena, run, to, dry_run=dry_run)


@router.get("/trash", dependencies=needs("read"), summary="Deleted runs that can be brought back, and the space they use")
def get_trash(services: Wired) -> Trash:
    return services.control.trash.seen()


@router.post(
    "/runs/{run}/undelete",
    dependencies=needs("admin", act="run-undeleted"),
    summary="Bring a deleted run back; it is read back and verified again",
)
def undelete_run(services: Wired, run: str, entry: Entry = None) -> TrashedRun:
    """409 if there is a run of this name, or ranks of one are connected."""
    return run_deletion.undelete_run(services.control.trash, services.saver, services.arena, run, entry=entry)


@router.delete("/runs/{run}/trash", dependencies=needs("admin", act="run-purged"), summary="Remove a deleted run for good")
def empty_trash(services: Wired, run: str, entry: Entry = None) -> Trash:
    """Returns what was removed."""
    gone = services.control.trash.empty(run, entry)
    return Trash(items=gone, bytes=sum(one.bytes for one in gone), days=services.control.trash.days)
