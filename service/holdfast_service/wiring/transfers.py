"""Wires exports, imports, merges and repairs, from the request to the result, for jobs and for scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InUse, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ExportJob, ImportJob, MergeJob
from holdfast_formats.rest.operations import Job
from holdfast_formats.root_files import check_local, check_output_place
from holdfast_service.control.opening import Control
from holdfast_service.daemon.copying.repair import Repairer, detail_of
from holdfast_service.daemon.copying.replicas import Replicator
from holdfast_service.storage import PosixTier, Tier, snapshot
from holdfast_service.storage.tier import split_leaf
from holdfast_service.wings.convert.export_jobs import Exporter
from holdfast_service.wings.convert.foreign import file_signs
from holdfast_service.wings.convert.foreign.kinds import kind_named
from holdfast_service.wings.convert.foreign.known_kinds import KINDS
from holdfast_service.wings.convert.foreign_export import check_terms
from holdfast_service.wings.convert.import_jobs import OURS, Importer
from holdfast_service.wings.merge.merge_jobs import Merger, OpenDirectory
from holdfast_service.wiring.progress import Progress

NO_REPLICAS: Mapping[str, Replicator] = {}


class Transfers:
    """Exports, imports, merges and repairs of one root."""

    def __init__(
        self,
        tier: Tier,
        control: Control,
        repairer: Repairer,
        place: Path | None = None,
        trains: Callable[[str], bool] = lambda run: False,
        replicators: Mapping[str, Replicator] = NO_REPLICAS,
    ) -> None:
        """`place` is the only directory that jobs may name, if any; `trains` says whether ranks of a run are connected, to
        any node; `replicators` are those of the replicas, by name.
        """
        self._tier, self._control, self.repairer, self._place = tier, control, repairer, place
        self._importer, self._exporter = Importer(tier, control), Exporter(tier, control)
        self._merger = Merger(tier, control, self._importer)
        self._trains, self.replicators = trains, replicators

    def check(self, wanted: ExportJob | ImportJob | MergeJob) -> None:
        """Refuse a request that must fail, before it becomes a job.

        Raises `InvalidRequest` for a path outside of `place` and for unknown names, `NoSuchCheckpoint` if there is nothing
        to export, `AlreadyCommitted` for a step that exists, `InUse` for a run that trains.
        """
        if isinstance(wanted, ExportJob):
            self._place_for(wanted)
            if wanted.arguments.form is not None:
                check_terms(wanted.arguments)
            if not self._tier.list(naming.checkpoint_path(wanted.run, wanted.step)):
                hint = f"holdfast ls {wanted.run} lists them"
                raise NoSuchCheckpoint(f"{wanted.run} has no checkpoint of step {wanted.step}", hint=hint)
            return
        if isinstance(wanted, ImportJob):
            self._reach(wanted.arguments.source)
            if wanted.arguments.kind not in (None, OURS):
                kind_named(wanted.arguments.kind, KINDS)
        self._check_idle(wanted)
        if isinstance(wanted, MergeJob):
            self._merger.check(wanted.arguments.recipe, self._model)
        self._control.imports.attempt(wanted.run, wanted.step)

    def export_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's export, below `place`."""
        wanted = ExportJob.of(job)
        return self.export(self._place_for(wanted), wanted, progress, again=job.tries > 1)

    def import_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's import from below `place`, as its run and step."""
        wanted = ImportJob.of(job)
        source = self._reach_snapshot(wanted.arguments.source)
        self._check_idle(wanted)
        return self.bring(source, wanted, progress, again=job.tries > 1)

    def merge_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's merge, as its run and step."""
        wanted = MergeJob.of(job)
        self._check_idle(wanted)
        return self.merge(wanted, self._model, progress, again=job.tries > 1)

    def export(self, place: PosixTier, wanted: ExportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Copy a checkpoint out, or export it for another program; it gets its name only when it is complete.

        Here and below, `again`: an earlier start of the service has begun the job.
        """
        if wanted.arguments.form is None:
            return self._exporter.copy(place, wanted, progress, again)
        return self._exporter.convert(place, wanted, progress, again)

    def bring(self, source: Files, wanted: ImportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Make a checkpoint from `source`, or report a dry run."""
        return self._importer.bring(source, wanted, progress, again)

    def merge(self, wanted: MergeJob, directory: OpenDirectory, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Merge by a recipe, or report a dry run."""
        return self._merger.merge(wanted, directory, progress, again)

    def repair(self, run: str, step: int) -> dict[str, Any]:
        """Repair what is damaged; raises remaining damage."""
        outcome = self.repairer.run(run, step)
        if outcome.left is not None:
            raise outcome.left
        return {"run": run, "step": step, "repaired": [detail_of(mended) for mended in outcome.mended]}

    def _check_idle(self, wanted: ImportJob | MergeJob) -> None:
        """`InUse` if ranks of the run are connected, which could restore the new checkpoint, or take it for theirs."""
        if not wanted.arguments.dry_run and self._trains(wanted.run):
            raise InUse(
                f"ranks of {wanted.run} are connected, and a restore of theirs could take {wanted.run}@{wanted.step}",
                hint="choose another run for it, or stop the training first",
            )

    def _place_for(self, wanted: ExportJob) -> PosixTier:
        """`place`, if an export's target may be there."""
        place = self._reach()
        split_leaf(wanted.arguments.to)
        check_local(wanted.arguments.to)
        check_output_place(place.root / wanted.arguments.to)
        return place

    def _reach_snapshot(self, below: str) -> Files:
        """A directory below `place`, or a snapshot in a hub's cache there."""
        source: Files = self._reach(below)
        if self._place is not None and below.count("/"):  # else a hub's blobs would be outside `place`
            source = snapshot.opened(self._place / below)
        return source

    def _model(self, path: str) -> Files:
        """The directory that a recipe names, below `place`."""
        return self._reach_snapshot(str(PurePosixPath(path)))

    def _reach(self, below: str = "") -> PosixTier:
        """The directory `place`, or one below it, opened without following a link."""
        if self._place is None:
            raise InvalidRequest(
                "this service exports to no directory and imports from none", hint="start it with --export-root DIR"
            )
        place = PosixTier(self._place)
        if below and not place.list(below):
            raise InvalidRequest(
                f"the directory {below!r} with files does not exist below the export root", hint="check its path"
            )
        return PosixTier(self._place / below) if below else place


def check_directory(path: Path) -> None:
    """`InvalidRequest` for what is no directory, with what to do with a file."""
    if path.is_dir():
        return
    if not path.exists():
        raise InvalidRequest(f"there is no directory {path}", hint="check the path")
    hint = file_signs.archive(path.name) or "put it into a directory with its config.json and tokenizer, and pass that"
    raise InvalidRequest(f"{path} is not a directory, but a file", hint=hint)


def open_source(path: Path) -> Files:
    """A directory to import from, including a snapshot in a hub's cache; `InvalidRequest` if it is not a directory."""
    check_directory(path)
    return snapshot.opened(path.resolve())
