"""Routes: delete a whole run, list the trash, restore a run, empty the trash."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest.runs import RenamedRun, Trash, TrashedRun
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.access.dry_run import DryRun
from holdfast_service.api.services import Services, Viewer, Wired
from holdfast_service.control.retention.run_trash import RunTrash

router = APIRouter(prefix="/v1", tags=["retention"], responses=problems.RESPONSES)
Marked = Annotated[bool, Query(description="delete it although some of its checkpoints are pinned or labelled")]
Entry = Annotated[
    str | None, Query(max_length=200, description="which one, by its name in the trash; by default the newest, or all")
]


@router.delete("/runs/{run}", dependencies=needs("admin", act="run-deleted"), summary="Delete a run: move it to the trash")
def delete_run(services: Wired, run: str, dry_run: DryRun, marked: Marked = False) -> TrashedRun:
    """409 while its ranks are connected, something of it is being saved or read, a job works on it, or a link leads to it.
    Copies in replicas are removed.
    """
    if services.delete_run is None:
        raise _without_daemon()
    return services.delete_run(run, marked=marked, dry_run=dry_run)


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
    if services.rename_run is None:
        raise _without_daemon()
    return services.rename_run(run, to, dry_run=dry_run)


@router.get(
    "/trash", dependencies=needs("read"), summary="Deleted runs that can be brought back, and the space that they take"
)
def get_trash(services: Wired) -> Trash:
    return _trash(services).seen()


@router.post(
    "/runs/{run}/undelete",
    dependencies=needs("admin", act="run-undeleted"),
    summary="Bring a deleted run back; it is read back and verified again",
)
def undelete_run(services: Wired, run: str, entry: Entry = None) -> TrashedRun:
    """409 if there is a run of this name, or ranks of one are connected."""
    if services.undelete_run is None:
        raise _without_daemon()
    return services.undelete_run(run, entry=entry)


@router.delete("/runs/{run}/trash", dependencies=needs("admin", act="run-purged"), summary="Remove a deleted run for good")
def empty_trash(services: Wired, run: str, entry: Entry = None) -> Trash:
    """Returns what was removed."""
    gone = _trash(services).empty(run, entry)
    return Trash(items=gone, bytes=sum(one.bytes for one in gone), days=_trash(services).days)


def _trash(services: Services) -> RunTrash:
    if services.trash is None:
        raise _without_daemon()
    return services.trash


def _without_daemon() -> NoSuchResource:
    return NoSuchResource("this service has no daemon, and deletes no runs", hint="ask the daemon that serves this root")
