"""Delete, restore or rename a whole run, while no rank of it is connected and none can join."""

from __future__ import annotations

from holdfast_formats.errors import InUse
from holdfast_formats.rest.runs import RenamedRun, TrashedRun
from holdfast_service.control.retention.run_renaming import RunRenaming
from holdfast_service.control.retention.run_trash import RunTrash
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.saving.saver import Saver

HINT = "stop its job first; killed ranks count as connected for a minute, in case they reconnect"


def delete_run(
    trash: RunTrash, saver: Saver, arena: Arena, run: str, *, marked: bool = False, dry_run: bool = False
) -> TrashedRun:
    """Delete a run and drop its in-memory checkpoint; `InUse` while ranks are connected or a save is running, and what
    `trash` raises.
    """
    with saver.entering(run):
        if dry_run:
            if run in saver.connected.runs:
                raise _in_use(run)
            return trash.delete(run, marked, dry_run=True)
        trash.delete(run, marked, dry_run=True)  # what refuses it refuses it before memory is dropped
        saver.holds.end(run)
        if arena.has(run) or not saver.vacate(run):
            raise _in_use(run)
        return trash.delete(run, marked)


def undelete_run(trash: RunTrash, saver: Saver, arena: Arena, run: str, *, entry: str | None = None) -> TrashedRun:
    """Restore a run; `InUse` while ranks of another run of its name are connected, and what `trash` raises."""
    with saver.entering(run):
        if arena.has(run) or not saver.vacate(run):
            raise _in_use(run)
        return trash.undelete(run, entry)


def rename_run(
    renaming: RunRenaming, saver: Saver, arena: Arena, run: str, name: str, *, dry_run: bool = False
) -> RenamedRun:
    """Rename a run; raises as `delete_run` does, and what `renaming` raises. The in-memory checkpoint is dropped."""
    first, second = sorted({run, name} if run != name else {run, ""})
    with saver.entering(first), saver.entering(second):
        for one in (run, name):
            if one in saver.connected.runs:
                raise _in_use(one)
        renamed = renaming.rename(run, name, dry_run=True)
        if dry_run:
            return renamed
        saver.holds.end(run)
        if arena.has(run) or not saver.vacate(run):
            raise _in_use(run)
        return renaming.rename(run, name)


def _in_use(run: str) -> InUse:
    return InUse(f"ranks of {run} are connected, or a save of it is in progress", hint=HINT)
