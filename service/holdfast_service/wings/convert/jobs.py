"""The kinds of jobs of this wing, and the directories that jobs may name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InUse, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.files import Files, split_leaf
from holdfast_formats.rest.jobs import ExportJob, ImportJob, MergeJob
from holdfast_formats.rest.operations import Job
from holdfast_formats.root_files import check_local, check_output_place
from holdfast_service.control.jobs.runner import JobKind
from holdfast_service.daemon.copying.progress import Progress
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.storage import Tier, tier_at
from holdfast_service.wings.convert import sources
from holdfast_service.wings.convert.export_jobs import Exporter
from holdfast_service.wings.convert.foreign.kinds import kind_named
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign_export import check_terms
from holdfast_service.wings.convert.import_jobs import Importer
from holdfast_service.wings.convert.importing import OURS


def jobs(workers: Workers) -> dict[str, JobKind]:
    """The kinds of jobs that this wing does."""
    control, place = workers.control, JobDirectories(workers.place)
    importer, exporter = Importer(control), Exporter(control)

    def check_import(wanted: ImportJob) -> None:
        place.source(wanted.arguments.source)
        if wanted.arguments.kind not in (None, OURS):
            kind_named(wanted.arguments.kind, KINDS)
        check_new(workers, wanted)

    def bring(job: Job, progress: Progress) -> dict[str, Any]:
        wanted = ImportJob.of(job)
        source = place.source(wanted.arguments.source)
        check_idle(workers.trains, wanted)
        return importer.bring(source, wanted, progress, again=job.tries > 1)

    def check_export(wanted: ExportJob) -> None:
        place.target(wanted.arguments.to)
        if wanted.arguments.form is not None:
            check_terms(wanted.arguments)
        if not control.store.files.list(naming.checkpoint_path(wanted.run, wanted.step)):
            hint = f"list its checkpoints with `holdfast ls {wanted.run}`"
            raise NoSuchCheckpoint(f"{wanted.run} has no checkpoint of step {wanted.step}", hint=hint)

    def export(job: Job, progress: Progress) -> dict[str, Any]:
        wanted = ExportJob.of(job)
        return exporter.export(place.target(wanted.arguments.to), wanted, progress, again=job.tries > 1)

    return {"export": JobKind(export, check_export), "import": JobKind(bring, check_import)}


def check_new(workers: Workers, wanted: ImportJob | MergeJob) -> None:
    """Refuse a new checkpoint that must fail: `AlreadyCommitted` for a step that exists, `InUse` for a run that trains."""
    check_idle(workers.trains, wanted)
    workers.control.imports.attempt(wanted.run, wanted.step)


def check_idle(trains: Callable[[str], bool], wanted: ImportJob | MergeJob) -> None:
    """`InUse` if ranks of the run are connected, which could restore the new checkpoint, or take it for theirs."""
    if not wanted.arguments.dry_run and trains(wanted.run):
        raise InUse(
            f"ranks of {wanted.run} are connected and might restore {wanted.run}@{wanted.step}",
            hint="import into another run, or stop the training first",
        )


class JobDirectories:
    """The directories that jobs may name: `place`, and those below it, opened without following links; none without it."""

    def __init__(self, place: Path | None) -> None:
        self._place = place

    def source(self, below: str) -> Files:
        """A directory or file below `place`; `InvalidRequest` if there is neither a file nor a directory with some."""
        return sources.open_below(self._checked(), below)

    def target(self, to: str) -> Tier:
        """`place`, if an export's target may be there."""
        place = self._checked()
        split_leaf(to)
        check_local(to)
        check_output_place(place / to)
        return tier_at(place)

    def _checked(self) -> Path:
        if self._place is None:
            raise InvalidRequest(
                "this daemon neither exports nor imports directories for HTTP callers",
                hint="run the command as the daemon's user on its machine, where any path works, or start the daemon "
                "with --export-root DIR",
            )
        return self._place
