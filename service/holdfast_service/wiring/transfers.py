"""Wires exports, imports, merges and repairs, from the request to the result, for jobs and for scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InUse, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.foreign import file_signs, sixteen_bits
from holdfast_formats.foreign.known_kinds import KINDS
from holdfast_formats.rest.operations import Job, JobRequest
from holdfast_formats.whereabouts import check_local, check_output_place
from holdfast_service.control.opening import Control
from holdfast_service.daemon.copying.exporting import Export
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.daemon.copying.importing import ImportOptions
from holdfast_service.daemon.copying.repair import Repairer, detail_of
from holdfast_service.daemon.copying.replicas import Replicator
from holdfast_service.storage import PosixTier, Tier, snapshot
from holdfast_service.storage.tier import split_leaf
from holdfast_service.wiring.exports import Exporter, ForeignExport
from holdfast_service.wiring.imports import OURS, Importer, WantedImport
from holdfast_service.wiring.merges import Merger, OpenDirectory
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

    def handlers(self) -> dict[str, Callable[[Job, Progress], dict[str, Any]]]:
        """The handlers for jobs of these kinds. `export` has `to` and perhaps `model_only`, or `as` and what `ExportTerms`
        has; `import` has `from`, what `ImportOptions` has, and perhaps `dry_run`; `merge` has `recipe`, a text, and perhaps
        `dry_run`. Paths are below `place`.
        """
        return {"export": self.export_job, "import": self.import_job, "merge": self.merge_job}

    def check(self, request: JobRequest) -> None:
        """Refuse a request of these kinds that must fail, before it becomes a job.

        Raises `InvalidRequest` for a path outside of `place` and for unknown arguments, `NoSuchCheckpoint` if there is
        nothing to export, `AlreadyCommitted` for a step that exists, `InUse` for a run that trains.
        """
        run, step = _named(request)
        if request.kind == "import":
            self._reach(_text(request, "from"))
            self._check_idle(_wanted_import(request))
            self._control.imports.attempt(run, step)
            return
        if request.kind == "merge":
            self._check_idle(_wanted_merge(request))
            self._merger.check(_text(request, "recipe"), self._model)
            self._control.imports.attempt(run, step)
            return
        self._place_for(_wanted_export(request))
        if not self._tier.list(naming.checkpoint_path(run, step)):
            raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"holdfast ls {run} lists them")

    def export_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's export, below `place`."""
        wanted = _wanted_export(job, again=job.tries > 1)
        return self.export(self._place_for(wanted), wanted, progress)

    def import_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's import from below `place`, as its run and step."""
        source, wanted = self._reach_snapshot(_text(job, "from")), _wanted_import(job, again=job.tries > 1)
        self._check_idle(wanted)
        return self.bring(source, wanted, progress)

    def merge_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Do a job's merge, as its run and step."""
        wanted = _wanted_merge(job, again=job.tries > 1)
        self._check_idle(wanted)
        return self.merge(_text(job, "recipe"), wanted, self._model, progress)

    def repair_job(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Repair a job's checkpoint; raises remaining damage."""
        return self.repair(*_named(job))

    def export(self, place: PosixTier, wanted: Export | ForeignExport, progress: Progress) -> dict[str, Any]:
        """Copy a checkpoint out, or export it for another program; it gets its name only when it is complete."""
        if isinstance(wanted, Export):
            return self._exporter.copy(place, wanted, progress)
        return self._exporter.convert(place, wanted, progress)

    def bring(self, source: Files, wanted: WantedImport, progress: Progress) -> dict[str, Any]:
        """Make a checkpoint from `source`, or report a dry run."""
        return self._importer.bring(source, wanted, progress)

    def merge(self, recipe: str, wanted: WantedImport, directory: OpenDirectory, progress: Progress) -> dict[str, Any]:
        """Merge by a recipe, or report a dry run."""
        return self._merger.merge(recipe, wanted, directory, progress)

    def repair(self, run: str, step: int) -> dict[str, Any]:
        """Repair what is damaged; raises remaining damage."""
        outcome = self.repairer.run(run, step)
        if outcome.left is not None:
            raise outcome.left
        return {"run": run, "step": step, "repaired": [detail_of(mended) for mended in outcome.mended]}

    def _check_idle(self, wanted: WantedImport) -> None:
        """`InUse` if ranks of the run are connected, which could restore the new checkpoint, or take it for their
        own save.
        """
        if not wanted.dry_run and self._trains(wanted.run):
            raise InUse(
                f"ranks of {wanted.run} are connected, and a restore of theirs could take {wanted.run}@{wanted.step}",
                hint="choose another run for it, or stop the training first",
            )

    def _place_for(self, wanted: Export | ForeignExport) -> PosixTier:
        """`place`, if an export's target may be there."""
        place = self._reach()
        split_leaf(wanted.target)
        check_local(wanted.target)
        check_output_place(place.root / wanted.target)
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


def _named(job: Job | JobRequest) -> tuple[str, int]:
    if job.run is None or job.step is None:
        raise InvalidRequest(
            f"a job of kind {job.kind!r} needs run and step", hint="pass the run and step of the checkpoint"
        )
    return naming.check_run(job.run), naming.check_step(job.step)


def _wanted_import(job: Job | JobRequest, again: bool = False) -> WantedImport:
    """What a job's arguments ask of an import; `InvalidRequest` for one that has another type, or that does not exist."""
    given = {name: value for name, value in job.arguments.items() if name != "from"}
    types: dict[str, type] = {
        "kind": str,
        "program": str,
        "as_is": bool,
        "assemble_flat": bool,
        "int16": str,
        "shards": int,
        "dry_run": bool,
    }
    for name, value in given.items():
        if name not in types:
            raise InvalidRequest(f"an import has no argument {name!r}", hint=f"from, {', '.join(types)}")
        if type(value) is not types[name]:
            raise InvalidRequest(f"the argument {name!r} of an import is not {_CALLED[types[name]]}")
    if given.get("kind") not in (None, OURS, *(kind.name for kind in KINDS)):
        known = ", ".join((OURS, *(kind.name for kind in KINDS)))
        raise InvalidRequest(f"there is no kind {given['kind']!r} of checkpoints", hint=f"one of {known}")
    if given.get("int16") not in (None, *sixteen_bits.WAYS):
        raise InvalidRequest(f"int16 of an import is {given['int16']!r}", hint=f"one of {', '.join(sixteen_bits.WAYS)}")
    dry_run = bool(given.pop("dry_run", False))
    return WantedImport(*_named(job), ImportOptions(**given), dry_run, again)


def _wanted_merge(job: Job | JobRequest, again: bool = False) -> WantedImport:
    """What a job's arguments ask of a merge besides its recipe; `InvalidRequest` for those that do not exist."""
    for name, value in job.arguments.items():
        if name not in ("recipe", "dry_run"):
            raise InvalidRequest(f"a merge has no argument {name!r}", hint="recipe, dry_run")
        if name == "dry_run" and not isinstance(value, bool):
            raise InvalidRequest("the argument 'dry_run' of a merge is not true or false")
    return WantedImport(*_named(job), dry_run=bool(job.arguments.get("dry_run", False)), again=again)


def _wanted_export(job: Job | JobRequest, again: bool = False) -> Export | ForeignExport:
    """What a job's arguments ask of an export; `InvalidRequest` for one that has another type, or that does not exist."""
    target, given = _text(job, "to"), dict(job.arguments)
    texts = ("as", "weights", "dtype", "layout", "program")
    if given.get("as") is None:
        alone = next((name for name in texts[1:] if given.get(name) is not None), None)
        if alone is not None:
            raise InvalidRequest(f"the argument {alone!r} of an export needs `as`", hint="say for which program")
        other = next((name for name in given if name not in ("to", "model_only", *texts)), None)
        if other is not None:
            raise InvalidRequest(f"an export has no argument {other!r}", hint=f"to, model_only, {', '.join(texts)}")
        if not isinstance(given.get("model_only", False), bool):
            raise InvalidRequest("the argument 'model_only' of an export is not true or false")
        return Export(*_named(job), target, bool(given.get("model_only", False)), again)
    for name, value in given.items():
        if name not in (*texts, "to"):
            raise InvalidRequest(f"an export with `as` has no argument {name!r}", hint=f"to, {', '.join(texts)}")
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"the argument {name!r} of an export is not a text")
    terms = ExportTerms(given["as"], **{name: given[name] for name in texts[1:] if name in given})
    terms.check()
    return ForeignExport(*_named(job), target, terms, again)


_MEANS = dict.fromkeys(("from", "to"), "a path below the export root") | {"recipe": "the text of a recipe"}
_CALLED: dict[type, str] = {str: "a text", bool: "true or false", int: "a number"}


def _text(job: Job | JobRequest, name: str) -> str:
    found = job.arguments.get(name)
    if not isinstance(found, str) or not found:
        raise InvalidRequest(f"a job of kind {job.kind!r} needs the argument {name!r}", hint=_MEANS.get(name, ""))
    return found
