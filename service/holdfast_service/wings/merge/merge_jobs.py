"""Wires merges, from the recipe to the commit: an import of tensors that are computed from other checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.jobs import MergeJob
from holdfast_formats.rest.operations import Job
from holdfast_service.control.control import Control
from holdfast_service.control.jobs.runner import JobKind
from holdfast_service.daemon.copying.progress import Progress
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.wing import RootWork
from holdfast_service.wings.convert.import_jobs import Importer
from holdfast_service.wings.convert.jobs import JobDirectories, check_idle, check_new
from holdfast_service.wings.convert.sources import open_source
from holdfast_service.wings.merge.planning import names_of, plan_merge
from holdfast_service.wings.merge.recipe import MergeRecipe, read_recipe
from holdfast_service.wings.merge.sources import ModelPlace, read_sources


def jobs(workers: Workers) -> dict[str, JobKind]:
    """The kind of job that this wing does."""
    place = JobDirectories(workers.place)
    merger = Merger(workers.control)

    def model(path: str) -> Files:
        return place.source(str(PurePosixPath(path)))

    def check(wanted: MergeJob) -> None:
        check_idle(workers.trains, wanted)
        merger.check(wanted.arguments.recipe, model)
        check_new(workers, wanted)

    def merge(job: Job, progress: Progress) -> dict[str, Any]:
        wanted = MergeJob.of(job)
        check_idle(workers.trains, wanted)
        return merger.merge(wanted, model, progress, again=job.tries > 1)

    return {"merge": JobKind(merge, check)}


def own_merge(work: RootWork, job: MergeJob, progress: Progress) -> dict[str, Any]:
    """Merge models of the root and of any directory; the report."""
    check_idle(work.trains, job)
    return Merger(work.control).merge(job, lambda path: open_source(work.here / path), progress, again=True)


OpenDirectory = Callable[[str], Files]  # the directory of a model that a recipe names by its path


class Merger:
    """Merges checkpoints into one root."""

    def __init__(self, control: Control) -> None:
        self._files, self._control, self._importer = control.store.files, control, Importer(control)

    def merge(self, wanted: MergeJob, directory: OpenDirectory, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Merge by a recipe, or report a dry run; the result is verified."""
        recipe = read_recipe(wanted.arguments.recipe)
        with ExitStack() as held:
            places = [self._place(name, directory, held) for name in names_of(recipe)]
            return self._importer.make(
                lambda goal: plan_merge(recipe, read_sources(places, recipe.assets_of.model), goal), wanted, progress, again
            )

    def check(self, text: str, directory: OpenDirectory) -> MergeRecipe:
        """A recipe with existing models; raises what is wrong with it, or missing."""
        recipe = read_recipe(text)
        with ExitStack() as held:
            for name in names_of(recipe):
                self._place(name, directory, held)
        return recipe

    def _place(self, name: str, directory: OpenDirectory, held: ExitStack) -> ModelPlace:
        """Where a model is; a checkpoint of this root is protected from removal until the block ends."""
        checkpoint_id = checkpoint_named(name)
        if checkpoint_id is None:
            return ModelPlace(name, directory(name))
        path = naming.checkpoint_path(*checkpoint_id)
        if self._files.size(f"{path}/{naming.COMMIT}") is None:
            raise NoSuchCheckpoint(
                f"there is no checkpoint {name}",
                hint=f"list them with `holdfast ls {checkpoint_id.run}`; write a directory with a /",
            )
        held.enter_context(self._control.readers.reading(*checkpoint_id))
        return ModelPlace(name, self._files, path)


def checkpoint_named(name: str) -> CheckpointId | None:
    """The checkpoint of the root that a recipe names as RUN@STEP; None for the path of a directory.

    Raises `InvalidRequest` for RUN@latest and the like, so that a recipe always means the same.
    """
    run, at, step = name.rpartition("@")
    if "/" in name or not at:
        return None
    if not naming.is_run_name(run) or not (step.isascii() and step.isdigit() and len(step) <= len(str(naming.STEP_MAX))):
        raise InvalidRequest(
            f"{name!r} does not name a checkpoint",
            hint="give RUN@STEP with a step number, or a directory's path with a /",
        )
    return CheckpointId(run, naming.check_step(int(step)))
