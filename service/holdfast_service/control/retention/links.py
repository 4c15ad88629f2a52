"""Symbolic links that keep the checkpoints they lead to (C9): frameworks look for checkpoints in directories of their own.

A run's file names the directories. Whether a checkpoint has a link is looked up in them each time, so that to remove a
link is to unpin the checkpoint, and a link that a person makes counts like any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_service.control.checkpoints.run_files import LinkDirectory, RunFile, RunFiles

DIRECTORIES_MAX = 100  # of a run


class LinkedSteps(NamedTuple):
    """The links to a run's checkpoints, by step; `unseen` are directories of which it is not known what they hold."""

    by_step: dict[int, str]
    unseen: tuple[str, ...]

    def holds(self, step: int) -> tuple[str, ...]:
        """Why retention must keep this step."""
        found = [f"{self.by_step[step]} is a link to it"] if step in self.by_step else []
        return (*found, *(f"{path}, which may hold a link to it, cannot be read" for path in self.unseen))


def watch(files: RunFiles, run: str, path: str) -> None:
    """From now on, links in this directory keep checkpoints of the run; directories that are gone are forgotten.

    Raises `InvalidRequest` for a directory that cannot be read here, `LimitExceeded` for too many.
    """
    if not Path(path).is_absolute() or os.path.normpath(path) != path:
        raise InvalidRequest(f"a directory of links must be an absolute path without '..': {path!r}")
    try:
        with os.scandir(path):
            made = LinkDirectory(path=path, device=Path(path).stat().st_dev)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the daemon cannot read the directory {path!r}, so a link in it would keep no checkpoint",
            hint="let the daemon see the directory under the same path, or pin the steps",
        ) from error

    def act(file: RunFile) -> RunFile:
        elsewhere = [one for one in file.link_directories if one.path == path and one.device != made.device]
        if elsewhere and not _names(path):
            raise InvalidRequest(
                f"{path} held links to {run} on another disk, and is empty now: that disk seems to be away",
                hint="mount it, or delete the directory from link_directories in the run's run.json",
            )
        others = [one for one in file.link_directories if one.path != path and not _is_gone(one)]
        if len(others) >= DIRECTORIES_MAX:
            raise LimitExceeded(f"links to {run} stand in {len(others)} directories already", hint="remove some of them")
        if made in file.link_directories and len(others) == len(file.link_directories) - 1:
            return file
        return file.model_copy(update={"link_directories": (*others, made)})

    files.change(run, act)


def standing(file: RunFile, run: str) -> LinkedSteps:
    """The links that stand now."""
    found: dict[int, str] = {}
    unseen: list[str] = []
    for directory in file.link_directories:
        try:
            here = {step: path for path, step in _links(directory.path, run)}
            if not here and Path(directory.path).stat().st_dev != directory.device:  # what was mounted there may be away
                unseen.append(directory.path)
            found = {**here, **found}
        except OSError:
            if not _is_gone(directory):
                unseen.append(directory.path)
    return LinkedSteps(found, tuple(unseen))


def _links(directory: str, run: str) -> Iterator[tuple[str, int]]:
    """Each link to a checkpoint of a run of this name. The root is not compared: it may have another path elsewhere."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.is_symlink() or naming.is_link_in_the_making(entry.name):
                continue
            try:
                step = naming.linked_step(run, os.readlink(entry.path))
            except FileNotFoundError:  # removed in this moment
                continue
            if step is not None:
                yield entry.path, step


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _is_gone(directory: LinkDirectory) -> bool:
    """Whether the directory was removed, rather than being on a disk that is not mounted now."""
    path = Path(directory.path)
    try:
        path.stat()
        return False
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return False
    for parent in path.parents:
        try:
            return parent.stat().st_dev == directory.device
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return False
    return False
