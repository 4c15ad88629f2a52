"""What is stored of runs besides their checkpoints: owner, notes, tags, archived, an acknowledged death.

run.json has what people set, launches.json what trainers sent; both are copied to the catalog, so that lists need neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InUse, InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import RunLife
from holdfast_formats.rest.runs import RunAbout, RunChange, RunLaunch
from holdfast_formats.tags import check_tags
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import launch_records, roots
from holdfast_service.control.checkpoints.launch_records import LaunchRecords
from holdfast_service.control.checkpoints.run_files import BY_LENGTH_MAX, RunFile, RunFiles
from holdfast_service.storage import Records

log = logging.getLogger(__name__)


class RunMetadata:
    """Of one root. Thread-safe."""

    def __init__(
        self, records: Records, catalog: Catalog, files: RunFiles, events: Events, now: Callable[[], str] = utc_now
    ) -> None:
        self._records, self._catalog, self._files, self._events, self._now = records, catalog, files, events, now
        self._launches = LaunchRecords(records)

    def of(self, found: bodies.Run) -> RunAbout:
        """The description of a run; `CorruptManifest` if its file cannot be read."""
        file, launches = self._files.read(found.name), launch_records.read(self._records, found.name)
        seen = _seen(file, found.attempt)
        return RunAbout(
            run=found.name,
            life=found.life,
            life_since=found.life_since,
            standing=found.standing,
            owner=file.owner or launch_records.owner_of(launches),
            notes=file.notes or launch_records.notes_of(launches),
            tags=list(launch_records.tags_of(launches) if file.tags is None else file.tags),
            archived=file.archived or None,
            acknowledged=seen,
            acknowledged_by=(file.acknowledged_by or None) if seen else None,
            acknowledged_at=(file.acknowledged_at or None) if seen else None,
            launches=launches[::-1],
        )

    def change(self, run: str, change: RunChange, life: RunLife, trains: bool, by: str) -> None:
        """Apply the change as the person `by`, all or nothing.

        Raises `InUse` to archive a run whose ranks are connected (`trains`), `InvalidRequest` to acknowledge the death of
        one that has not died, and for a tag that is not allowed, `LimitExceeded` for too many tags. The first
        acknowledgement stays.
        """
        attempt, before = self._catalog.run(run).attempt, self._files.read(run)
        seen = _seen(before, attempt)
        if change.archived and trains:
            raise InUse(f"ranks of {run} are connected", hint="stop its job first; a run that is training stays listed")
        if change.acknowledged and not seen and life not in ("died", "archived"):
            raise InvalidRequest(
                f"{run} has not died: it is {life}",
                hint="only a death can be acknowledged; `holdfast show` shows its state",
            )
        launches = launch_records.read(self._records, run)
        own = {"owner": launch_records.owner_of(launches), "notes": launch_records.notes_of(launches)}  # need not be set
        stated = {name: getattr(change, name) for name in own if getattr(change, name) is not None}
        wanted: dict[str, Any] = {name: "" if text == own[name] else text for name, text in stated.items()}
        trainers = launch_records.tags_of(launches)
        if change.acknowledged and not seen:
            wanted |= {"acknowledged": attempt, "acknowledged_by": by[:BY_LENGTH_MAX], "acknowledged_at": self._now()}
        elif change.acknowledged is False:
            wanted |= {"acknowledged": 0, "acknowledged_by": "", "acknowledged_at": ""}
        changes = list(_told(change))

        def act(file: RunFile) -> RunFile:
            file = _tagged(file, trainers, change)
            if change.archived is not None and change.archived != bool(file.archived):
                return file.model_copy(update={**wanted, "archived": self._now() if change.archived else ""})
            return file.model_copy(update=wanted)

        after = self._files.change(run, act)
        with self._catalog.database.told_later(f"{run} was changed"):
            self._list(run, after)
        if after != before and changes:
            stated = change.model_dump(exclude_none=True)
            self._events.add("run-changed", f"the run was changed: {', '.join(changes)}", run, by=by, **stated)

    def launched(self, run: str, run_launch: RunLaunch) -> None:
        """Store a launch's description; a failure is logged. `CatalogUnavailable`: try again."""
        refused = launch_records.check(run_launch.info)
        if refused is not None:
            log.warning("the description of attempt %d of %s is not stored: %s", run_launch.attempt, run, refused)
            return
        try:
            with self._files.exclusively(run) as still:
                self._files.refuse_gone(run)
                still()
                self._launches.note(run, run_launch)
            self._list(run)
        except CatalogUnavailable:
            raise  # the client sends it again
        except CheckpointError as error:
            log.warning("the description of attempt %d of %s is not stored: %s", run_launch.attempt, run, error.detail)

    def resumed(self, run: str) -> None:
        """A new launch has begun: unarchive the run. `CatalogUnavailable`: try again."""
        try:
            if self._files.read(run).archived:
                self._list(run, self._files.change(run, lambda file: file.model_copy(update={"archived": ""})))
                self._events.add("run-changed", "a new launch unarchived the run", run)
        except CatalogUnavailable:
            raise
        except CheckpointError as error:
            log.warning("cannot unarchive %s: %s", run, error.detail)

    def _list(self, run: str, file: RunFile | None = None) -> None:
        said = roots.settings_of(self._records, run, file)
        if said is not None:
            run_settings.note(self._catalog, run, said, known_only=True)


def _tagged(file: RunFile, trainers: tuple[str, ...], change: RunChange) -> RunFile:
    """The file with the changed tags; those that the trainer gives need not be set."""
    added, removed = check_tags(change.tag or ()), check_tags(change.untag or ())
    if not added and not removed:
        return file
    tags = check_tags({*(trainers if file.tags is None else file.tags), *added} - {*removed})
    return file.model_copy(update={"tags": None if tags == trainers else tags})


def _seen(file: RunFile, attempt: int) -> bool:
    return bool(file.acknowledged) and file.acknowledged == attempt


def _told(change: RunChange) -> list[str]:
    changes = [name for name in ("owner", "notes") if getattr(change, name) is not None]
    changes += [f"tagged {', '.join(change.tag)}"] if change.tag else []
    changes += [f"untagged {', '.join(change.untag)}"] if change.untag else []
    if change.archived is not None:
        changes.append("archived" if change.archived else "unarchived")
    if change.acknowledged is not None:
        changes.append(
            "its death was acknowledged" if change.acknowledged else "the acknowledgement of its death was withdrawn"
        )
    return changes
