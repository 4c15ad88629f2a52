"""The checkpoints of a run, as a root's directory shows them, and one of them opened, from there or over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from holdfast.read.reader import CheckpointReader, read_placement
from holdfast.read.sources import DirectorySource, HttpSource
from holdfast.rest.api import Api
from holdfast_formats import lineage, naming
from holdfast_formats.errors import Damaged, NoSuchCheckpoint


def open_checkpoint(root: Path | None, url: str | None, run: str, step: int) -> CheckpointReader:
    """The checkpoint, read from its directory where that can be seen, else over HTTP from the daemon."""
    directory = root / naming.checkpoint_path(run, step) if root is not None else None
    if directory is not None and (directory.is_dir() or url is None):
        if not directory.is_dir():
            raise NoSuchCheckpoint(f"{root} has no checkpoint {run}@{step}", hint="`holdfast ls` lists what there is")
        return CheckpointReader.open(DirectorySource(directory))
    if url is None:
        raise NoSuchCheckpoint(
            f"there is no way to read {run}@{step}: the daemon's directory is not to be seen here, nor does it listen",
            hint="mount the daemon's root at the same path here, or start it with --listen",
        )
    return CheckpointReader.open(HttpSource(Api(url), run, step))


def living_steps(root: Path, run: str, among: Sequence[int] | None = None) -> list[int]:
    """The steps of `committed_steps`, or `among` others, that training has not left behind by going on from an older one."""
    steps, known = committed_steps(root, run) if among is None else among, []
    for step in steps:
        with suppress(Damaged), closing(DirectorySource(root / naming.checkpoint_path(run, step))) as source:
            known.append(read_placement(source))  # what is wrong with it, loading it says
    left = lineage.abandoned(known)
    return [step for step in steps if step not in left]


def committed_steps(root: Path, run: str) -> list[int]:
    """The steps whose directories are committed, newest first; none when the run is not there."""
    directory = root / naming.check_run(run) / naming.CHECKPOINTS
    if not directory.is_dir():
        return []
    steps = (naming.parse_step_directory(entry.name) for entry in directory.iterdir() if (entry / naming.COMMIT).is_file())
    return sorted((step for step in steps if step is not None), reverse=True)


def published_steps(root: Path, run: str) -> list[int]:
    """Those, and the steps that have everything but their COMMIT, newest first: nothing stands here without one (I1), so
    somebody or something has taken it away, and reading them says so."""
    directory = root / naming.check_run(run) / naming.CHECKPOINTS
    entries = directory.iterdir() if directory.is_dir() else ()
    steps = (naming.parse_step_directory(entry.name) for entry in entries if (entry / naming.MANIFEST).is_file())
    return sorted({*committed_steps(root, run), *(step for step in steps if step is not None)}, reverse=True)
