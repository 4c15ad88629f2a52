"""Wires exports, imports and repairs, from the request to the result, for jobs and for scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import AlreadyCommitted, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.naming import Place
from holdfast_formats.rest.operations import Job, JobRequest
from holdfast_service.control.checkpoints import commit
from holdfast_service.control.decisions import Decisions
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying import exporting, importing
from holdfast_service.daemon.copying.copies import Going, read_pair
from holdfast_service.daemon.copying.exporting import Export
from holdfast_service.daemon.copying.importing import Goal
from holdfast_service.daemon.copying.repair import Repairer, detail_of
from holdfast_service.storage import PosixTier, Readable, Tier, snapshot
from holdfast_service.storage.tier import split_leaf


class Progress(Protocol):
    """Receives the progress of work; it may raise, to stop the work."""

    def report(self, done_bytes: int, total_bytes: int) -> None: ...


class Quiet:
    """Ignores progress."""

    def report(self, done_bytes: int, total_bytes: int) -> None:
        """Hear it and go on."""


class Transfers:
    """Brings checkpoints out of one root and into it. `place` is the only directory that jobs may name, if any."""

    def __init__(self, tier: Tier, decisions: Decisions, repairer: Repairer, place: Path | None = None) -> None:
        self._tier, self._decisions, self.repairer, self._place = tier, decisions, repairer, place

    def handlers(self) -> dict[str, Callable[[Job, Progress], dict[str, Any]]]:
        """The handlers for jobs of these kinds. `export` has `to` and perhaps `model_only`, `import` has `from`: below
        `place`.
        """
        return {"export": self.export_job, "import": self.import_job}

    def check(self, request: JobRequest) -> None:
        """Refuse a request of these kinds that must fail, before it becomes a job.

        Raises `InvalidRequest` for a path that is not below `place`, `NoSuchCheckpoint` if there is nothing to export,
        `AlreadyCommitted` for a step that exists.
        """
        run, step = _named(request)
        if request.kind == "import":
            self._reach(_text(request, "from"))
            self._decisions.imports().attempt(run, step)
            return
        self._reach()
        split_leaf(_text(request, "to"))
        if not self._tier.list(naming.checkpoint_path(run, step)):
            raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"holdfast ls {run} lists them")

    def export_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's export, below `place`."""
        run, step = _named(job)
        wanted = Export(run, step, _text(job, "to"), bool(job.arguments.get("model_only", False)))
        return self.export(self._reach(), wanted, progress)

    def import_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's import from below `place`, as its run and step."""
        below = _text(job, "from")
        source: Readable = self._reach(below)
        if self._place is not None and below.count("/"):  # else a hub's blobs would be outside `place`
            source = snapshot.opened(self._place / below)
        return self.bring(source, *_named(job), progress)

    def repair_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Repair a job's checkpoint; raises the damage that is left."""
        return self.repair(*_named(job))

    def export(self, place: Tier, wanted: Export, progress: Progress) -> dict[str, Any]:
        """Copy a checkpoint out; it gets its name only when it is complete."""
        with self._decisions.reading(wanted.run, wanted.step):
            size = read_pair(self._tier, naming.checkpoint_path(wanted.run, wanted.step)).made.bytes
            staging, made = exporting.stage(self._tier, place, wanted, _going(progress, 2 * size))
        try:
            commit.publish_export(place, staging, wanted.target)
        except AlreadyCommitted:
            place.remove_tree(staging)
            raise
        return {"to": wanted.target, "files": len(made.files), "bytes": made.bytes, "committed": not wanted.model_only}

    def bring(self, source: Readable, run: str, step: int, progress: Progress) -> dict[str, Any]:
        """Make a checkpoint from `source`; it is read back, and then counts as verified."""
        imports = self._decisions.imports()
        place = Place(run, step, naming.NO_ATTEMPT)
        staging = place.path
        ours = importing.is_checkpoint(source)
        pair = read_pair(source, "") if ours else None
        goal = Goal(run, step, imports.attempt(run, step, pair.made.attempt if pair else None), staging, imports.way(run))
        plan = importing.counted(pair.made) if pair else importing.plan_import(source, goal)
        imports.admit(plan._replace(run=run, step=step))
        self._tier.remove_tree(staging)
        try:
            if pair:
                copied = importing.copy_in(source, self._tier, goal, _going(progress, 2 * plan.bytes))
                made = imports.publish(place, (copied.encoded, copied.commit))
            else:
                importing.pack_anew(source, self._tier, plan, goal, _going(progress, plan.bytes))
                made = imports.publish(place, plan)
        except BaseException:
            self._tier.remove_tree(staging)
            raise
        return self._verified(made)

    def repair(self, run: str, step: int) -> dict[str, Any]:
        """Repair what is damaged; raises the damage that is left."""
        outcome = self.repairer.run(run, step)
        if outcome.left is not None:
            raise outcome.left
        return {"run": run, "step": step, "repaired": [detail_of(mended) for mended in outcome.mended]}

    def _verified(self, made: Manifest) -> dict[str, Any]:
        with self._decisions.reading(made.run, made.step):
            verify(self._tier, naming.checkpoint_path(made.run, made.step))
        self._decisions.findings.sound(made.run, made.step, made=made)
        tensors = sum(len(named) for named in made.tensors.values())
        return {"run": made.run, "step": made.step, "tensors": tensors, "files": len(made.files), "bytes": made.bytes}

    def _reach(self, below: str = "") -> Tier:
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


def open_source(path: Path) -> Readable:
    """A directory to import from, including a snapshot in a hub's cache; `InvalidRequest` if it is not a directory."""
    if not path.is_dir():
        raise InvalidRequest(f"{path} is not a directory", hint="pass the directory that contains the files")
    return snapshot.opened(path.resolve())


def _going(progress: Progress, total: int) -> Going:
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        progress.report(min(done, total), total)

    return Going(moved=moved)


def _named(job: Job | JobRequest) -> tuple[str, int]:
    if job.run is None or job.step is None:
        raise InvalidRequest(
            f"a job of kind {job.kind!r} needs run and step", hint="pass the run and step of the checkpoint"
        )
    return naming.check_run(job.run), naming.check_step(job.step)


def _text(job: Job | JobRequest, name: str) -> str:
    found = job.arguments.get(name)
    if not isinstance(found, str) or not found:
        raise InvalidRequest(f"a job of kind {job.kind!r} needs the argument {name!r}", hint="a path below the export root")
    return found
