"""`train(resume_from_checkpoint=…)`: a step of the run, a directory of the framework's own, or a new start."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

AUTO, HEALTHY = "auto", "latest-healthy"
STATE_FILE = "trainer_state.json"
_ACCEPTED = f"pass True, False, a step, {AUTO!r}, {HEALTHY!r}, or a checkpoint's directory"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Wanted(NamedTuple):
    """What to resume from: the newest step, unless one is named, or a `directory` that the framework itself wrote."""

    step: int | None = None
    healthy: bool = False
    needed: bool = False  # whether it is an error if there is nothing to resume from
    from_scratch: bool = False  # what the run has is left behind
    directory: str | None = None
    place: Path | None = None  # of the step, if a directory was given: a root has its own runs


def wanted(asked: object, run: str) -> Wanted:
    """Parse the argument for a run. Raises `InvalidRequest` for unknown values, and for checkpoints of other runs."""
    if asked is None or asked == AUTO:
        return Wanted()
    if isinstance(asked, bool):
        return Wanted(needed=True) if asked else Wanted(from_scratch=True)
    if asked == HEALTHY:
        return Wanted(healthy=True, needed=True)
    if isinstance(asked, str | os.PathLike):
        text = os.fspath(asked)
        if isinstance(text, str) and os.path.lexists(text):
            return _of_directory(Path(text), run)
        if isinstance(text, str) and text.isascii() and text.isdigit():
            return Wanted(step=int(text), needed=True)
        raise InvalidRequest(f"Can't find a valid checkpoint at {asked}: it is neither a step nor a path", hint=_ACCEPTED)
    if isinstance(asked, SupportsIndex):
        return Wanted(step=naming.check_step(asked.__index__()), needed=True)
    raise InvalidRequest(f"resume_from_checkpoint={asked!r} is not valid", hint=_ACCEPTED)


def own_checkpoint(output_dir: str, files: Collection[str] = (STATE_FILE,)) -> tuple[int, str] | None:
    """The newest checkpoint in the directory that the framework itself wrote, with its step. It has one of these files."""
    entries = numbered(output_dir).items()
    own = [(step, str(entry)) for step, entry in entries if not entry.is_symlink() and _has_one(entry, files)]
    return max((one for one in own if not (Path(one[1]) / naming.COMMIT).is_file()), default=None)


def numbered(output_dir: str) -> dict[int, Path]:
    """What is named `checkpoint-N` in the directory, by step, in ascending order."""
    try:
        entries = list(Path(output_dir).iterdir())
    except OSError:
        return {}
    return dict(sorted((int(match[1]), entry) for entry in entries if (match := _CHECKPOINT.fullmatch(entry.name))))


def links(output_dir: str, run: str) -> dict[int, Path]:
    """The links `checkpoint-N` to checkpoints of the run, by step, in ascending order."""
    entries = numbered(output_dir).items()
    return {step: one for step, one in entries if one.is_symlink() and naming.linked_step(run, os.readlink(one)) == step}


def not_of(run: str, path: Path) -> InvalidRequest:
    """The error for a checkpoint of another run, or of a run of this name in another root."""
    return InvalidRequest(
        f"{path} is a Holdfast checkpoint, but not of run {run}, to which the Trainer is attached",
        hint=f"attach it to the run and the root of that checkpoint, or `holdfast import {path} {run}@STEP`; with a daemon "
        "elsewhere, pass the number of a step",
    )


def _has_one(directory: Path, files: Collection[str]) -> bool:
    return any((directory / name).is_file() for name in files)


def _of_directory(path: Path, run: str) -> Wanted:
    linked = naming.linked_step(run, os.readlink(path)) if path.is_symlink() else None
    if linked is None and not (path / naming.COMMIT).is_file():
        return Wanted(directory=str(path), from_scratch=True)
    step = linked if linked is not None else naming.linked_step(run, os.path.realpath(path))
    if step is None:
        raise not_of(run, path)
    return Wanted(step=step, needed=True, place=path)
