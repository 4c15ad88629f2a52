"""Reading a root: its runs and their checkpoints. The directory is the truth, and the catalog is told of it."""

from __future__ import annotations

from typing import NamedTuple

from holdfast_formats import manifest, naming, rest
from holdfast_formats.errors import CheckpointError, CorruptManifest, NoSuchCheckpoint, NotCommitted
from holdfast_formats.manifest import Manifest
from holdfast_service.storage import Tier

from .catalog import PAGE_ITEMS_MAX, Catalog
from .run_files import read_run_file

COMMIT_BYTES_MAX = 2**16
MANIFEST_BYTES_MAX = 2**31


class Problem(NamedTuple):
    """Why a checkpoint is on disk but not listed; `step` is None when it is the run file that cannot be read."""

    run: str
    step: int | None
    error: CheckpointError


def runs(tier: Tier) -> list[str]:
    """The names of all runs below the root: directories with a run's name that hold checkpoints/ or run.json."""
    marks = {naming.CHECKPOINTS, naming.RUN_FILE}
    return [name for name in tier.list("") if naming.is_run_name(name) and marks & set(tier.list(name))]


def committed(tier: Tier, run: str) -> list[int]:
    """The steps of a run's directories that hold a COMMIT, ascending; whether it is a sound one is not asked here."""
    return [
        step for step in _steps(tier, run) if tier.size(f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}") is not None
    ]


def load_manifest(tier: Tier, run: str, step: int) -> Manifest:
    """The manifest of a checkpoint, in the order of I5: COMMIT first.

    Raises `NoSuchCheckpoint` when there is no directory, `NotCommitted` when COMMIT is missing or unreadable, and
    `CorruptManifest` when the manifest is missing, is not what COMMIT states, or belongs to another run or step.
    """
    directory = naming.checkpoint_path(run, step)
    names = tier.list(directory)
    if not names:
        raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"holdfast ls {run} lists them")
    if naming.COMMIT not in names:
        raise NotCommitted(f"{directory} has no {naming.COMMIT}", hint="restore another step", file=naming.COMMIT)
    if naming.MANIFEST not in names:
        raise CorruptManifest(f"{directory} has no {naming.MANIFEST}", hint="restore another step", file=naming.MANIFEST)
    commit = _read_bounded(tier, f"{directory}/{naming.COMMIT}", COMMIT_BYTES_MAX)
    made = manifest.decode(_read_bounded(tier, f"{directory}/{naming.MANIFEST}", MANIFEST_BYTES_MAX), commit)
    if (made.run, made.step) != (run, step):
        raise CorruptManifest(
            f"{directory} holds {made.run}@{made.step}",
            hint=f"it was moved or copied: give it back its name, {naming.checkpoint_path(made.run, made.step)}",
            file=naming.MANIFEST,
        )
    return made


def reconcile(tier: Tier, catalog: Catalog) -> list[Problem]:
    """Make the catalog say what the directories say; return what is on disk but cannot be listed.

    What is found becomes listed, unverified; what is listed as it stands on disk keeps its `verified`; what is gone or does
    not decode is listed no more. A run that the catalog knows stays known without a directory: its attempt numbers still
    fence off older writers (I6).
    """
    problems: list[Problem] = []
    found = runs(tier)
    for run in found:
        problems += _reconcile_run(tier, catalog, run)
    for run in set(_all_runs(catalog)) - set(found):
        for listed in all_checkpoints(catalog, run):
            catalog.forget_checkpoint(run, listed.step)
    return problems


def _reconcile_run(tier: Tier, catalog: Catalog, run: str) -> list[Problem]:
    problems: list[Problem] = []
    keep_last = catalog.keep_last(run)
    try:
        if tier.size(f"{run}/{naming.RUN_FILE}") is not None:
            keep_last = read_run_file(tier, run).in_force.last
    except CheckpointError as error:
        problems.append(Problem(run, None, error))
    catalog.set_keep_last(run, keep_last)
    listed = {checkpoint.step: checkpoint for checkpoint in all_checkpoints(catalog, run)}
    for step in _steps(tier, run):
        try:
            there = rest.describe(load_manifest(tier, run, step))
        except CheckpointError as error:
            problems.append(Problem(run, step, error))
            continue
        before = listed.pop(step, None)
        if before is None or before.model_copy(update={"verified": False}) != there:
            catalog.record_checkpoint(there)
    for step in listed:
        catalog.forget_checkpoint(run, step)
    return problems


def _steps(tier: Tier, run: str) -> list[int]:
    steps = (naming.parse_step_directory(name) for name in tier.list(f"{naming.check_run(run)}/{naming.CHECKPOINTS}"))
    return sorted(step for step in steps if step is not None)


def _all_runs(catalog: Catalog) -> list[str]:
    names: list[str] = []
    cursor = None
    while True:
        page = catalog.runs(cursor, PAGE_ITEMS_MAX)
        names += [run.name for run in page.items]
        cursor = page.next
        if cursor is None:
            return names


def all_checkpoints(catalog: Catalog, run: str) -> list[rest.Checkpoint]:
    """Every checkpoint that the catalog lists of a run, newest step first."""
    items: list[rest.Checkpoint] = []
    cursor = None
    while True:
        page = catalog.checkpoints(run, cursor, PAGE_ITEMS_MAX)
        items += page.items
        cursor = page.next
        if cursor is None:
            return items


def _read_bounded(tier: Tier, path: str, bytes_max: int) -> bytes:
    data = tier.read(path, 0, bytes_max + 1)
    if len(data) > bytes_max:
        raise CorruptManifest(
            f"{path} is over the limit of {bytes_max} bytes", hint="it cannot be a file of ours", file=path
        )
    return data
