"""Wires imports, from the request to the commit: staged files are verified before the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, Damaged, NotFound
from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ImportJob, MergeJob
from holdfast_service.control.control import Control
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.copies import read_back
from holdfast_service.daemon.copying.progress import Progress, going
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.wings.convert import import_report, importing
from holdfast_service.wings.convert.importing import Goal, PlannedImport

Planner = Callable[[Goal], PlannedImport]
_OF_OURS: dict[str, Any] = {"kind": importing.OURS, "files": [], "notes": []}


class Importer:
    """Makes checkpoints of one root."""

    def __init__(self, control: Control) -> None:
        self._control, self._store = control, control.store

    def bring(self, source: Files, wanted: ImportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Make a checkpoint from `source`, or report a dry run; it is verified.

        `again`: an earlier start of the service has begun the job.
        """
        ours = importing.is_ours(source, wanted.arguments.kind, wanted.arguments.chosen)
        if wanted.arguments.dry_run:
            self._control.imports.attempt(wanted.run, wanted.step)
            return foretold(source, wanted)
        if ours:
            return self._copy(source, wanted, progress)
        return self.make(lambda goal: importing.plan_import(source, goal, wanted.arguments), wanted, progress, again)

    def make(self, plan: Planner, wanted: ImportJob | MergeJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Make a planned checkpoint, or report a dry run; resumes a killed job."""
        try:
            attempt = self._control.imports.attempt(wanted.run, wanted.step)
        except AlreadyCommitted:
            if not again:
                raise
            return self._committed_before(plan, wanted)
        planned = plan(Goal(wanted.run, wanted.step, attempt))
        if wanted.arguments.dry_run:
            return {**import_report.report(planned, import_report.source_of(planned, read=False)), **_dry(planned)}
        planned = planned._replace(node=self._control.nodes.node)
        with self._control.imports.alone(planned.place):
            target = self._target(planned)
            try:
                return self._made(planned, target, progress)
            except Interrupted:
                raise  # the job goes on from what is staged
            except BaseException:
                target.forget()
                self._store.discard(planned.place)
                raise

    def _target(self, planned: PlannedImport) -> StreamTarget:
        return StreamTarget(self._store.begin(planned.place), self._control.records)

    def _made(self, planned: PlannedImport, target: StreamTarget, progress: Progress) -> dict[str, Any]:
        imports, staged = self._control.imports, target.staged
        imports.admit(importing.left_of(planned, staged))
        ahead = going(progress, 2 * planned.bytes)
        receipt = importing.write(planned, target, ahead)
        source = import_report.source_of(planned)
        plan = planned.plan._replace(state=state_json.with_source(planned.plan.state, source))
        vouched = imports.vouch(plan, receipt)
        for name, data in vouched.small.items():
            importing.put_again(staged, name, data)
        read_back(staged.files, staged.path, vouched.made, ahead)
        manifest = imports.publish(planned.place, vouched.encoded, vouched.commit, planned.made_how)
        return self._done(planned, source, manifest)

    def _done(self, planned: PlannedImport, source: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
        self._target(planned).forget()
        self._control.findings.sound(manifest.run, manifest.step, made=manifest)
        return {**import_report.report(planned, source), **_counts(manifest)}

    def _committed_before(self, plan: Planner, wanted: ImportJob | MergeJob) -> dict[str, Any]:
        """The result of a job whose service was killed after the commit; `AlreadyCommitted` for anything else."""
        taken = AlreadyCommitted(
            f"{wanted.run}@{wanted.step} is already committed", hint="remove it, or choose another step"
        )
        path = naming.checkpoint_path(wanted.run, wanted.step)
        try:
            source = state_json.source_of(self._store.files.read(f"{path}/{naming.STATE}"))
        except (Damaged, NotFound):
            raise taken from None
        if source is None:
            raise taken
        planned = plan(Goal(wanted.run, wanted.step, 0))
        if source.get("job") != planned.job:
            raise taken
        return self._done(planned, dict(source), self._verified(wanted.run, wanted.step))

    def _copy(self, source: Files, wanted: ImportJob, progress: Progress) -> dict[str, Any]:
        """Copy a Holdfast checkpoint."""
        imports, run, step = self._control.imports, wanted.run, wanted.step
        pair = open_checkpoint(source, "")
        # A node that has lost its lease may still write, and must not meet the one that has taken its job.
        place = naming.job_place(run, step, digest(f"{self._control.nodes.node} ".encode() + pair.commit))
        goal = Goal(run, step, imports.attempt(run, step, pair.manifest.attempt), imports.way(run))
        plan = importing.counted(pair.manifest)
        imports.admit(plan._replace(run=run, step=step))
        with imports.alone(place):
            staged = self._store.begin(place)
            try:
                staged.clear()  # an earlier start's
                ahead = going(progress, 2 * plan.bytes)
                copied = importing.copy_in(source, staged, goal, ahead)
                read_back(staged.files, staged.path, copied.manifest, ahead)
                manifest = imports.publish(place, copied.encoded, copied.commit)
            except BaseException:
                self._store.discard(place)
                raise
        self._control.findings.sound(run, step, made=manifest)
        return {"run": run, "step": step, "source": _OF_OURS, **_counts(manifest)}

    def _verified(self, run: str, step: int) -> Manifest:
        with self._control.readers.reading(run, step):
            return verify(self._store.files, naming.checkpoint_path(run, step))


def foretold(source: Files, wanted: ImportJob) -> dict[str, Any]:
    """A dry run of an import. Names and headers are read, and nothing is written; raises what the import would."""
    if importing.is_ours(source, wanted.arguments.kind, wanted.arguments.chosen):
        counts = _counts(open_checkpoint(source, "").manifest)
        return {"run": wanted.run, "step": wanted.step, "dry_run": True, "source": _OF_OURS, **counts}
    planned = importing.plan_import(source, Goal(wanted.run, wanted.step, 0), wanted.arguments)
    return {**import_report.report(planned, import_report.source_of(planned, read=False)), **_dry(planned)}


def _counts(manifest: Manifest) -> dict[str, Any]:
    return {
        "tensors": sum(len(named) for named in manifest.tensors.values()),
        "files": len(manifest.files),
        "bytes": manifest.bytes,
    }


def _dry(planned: PlannedImport) -> dict[str, Any]:
    return {"dry_run": True, "files": len(planned.files) + len(planned.plan.assets), "bytes": planned.bytes}
