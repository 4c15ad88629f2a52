"""Symbolic links that keep the checkpoints they lead to (C9): frameworks look for checkpoints in directories of their own.

A run's file names the directories. They are read each time, so removing a link unpins its checkpoint, and a link that a
person creates counts like any other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_service.control.checkpoints.run_files import LinkDirectory, RunFile, RunFiles

DIRECTORIES_MAX = 100  # of a run
LOOK_S = 5.0  # what a look into a directory may take
_hanging: set[str] = set()  # directories into which a look has not ended in time
_hanging_lock = threading.Lock()
_Seen = TypeVar("_Seen")


class LinkedSteps(NamedTuple):
    """The links to a run's checkpoints, by step; `unseen` are directories that could not be read."""

    by_step: dict[int, str]
    unseen: tuple[str, ...]

    def holds(self, step: int) -> tuple[str, ...]:
        """Why retention must keep this step."""
        reasons = [f"{self.by_step[step]} is a link to it"] if step in self.by_step else []
        return (*reasons, *(f"{path}, which may hold a link to it, cannot be read" for path in self.unseen))


def watch(files: RunFiles, run: str, path: str) -> None:
    """From now on, links in this directory keep checkpoints of the run; directories that are gone are dropped.

    Raises `InvalidRequest` for a directory that cannot be read here, `LimitExceeded` for too many.
    """
    if not Path(path).is_absolute() or os.path.normpath(path) != path:
        raise InvalidRequest(f"a directory of links must be an absolute path without '..': {path!r}")
    try:
        device, names = _limited(path, lambda: (Path(path).stat().st_dev, os.listdir(path)))
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the daemon cannot read the directory {path!r}, so links in it could not protect checkpoints",
            hint="make the directory visible to the daemon under the same path, or pin the steps",
        ) from error
    link_directory = LinkDirectory(path=path, device=device)
    gone = {one for one in files.read(run).link_directories if one.path != path and _is_known_to_be_gone(one)}

    def act(file: RunFile) -> RunFile:  # looks at no disk: while it runs, no run's file changes
        elsewhere = [one for one in file.link_directories if one.path == path and one.device != device]
        if elsewhere and not names:
            raise InvalidRequest(
                f"{path} held links to {run} on another disk but is empty now: that disk seems to be missing",
                hint="mount it, or delete the directory from link_directories in the run's run.json",
            )
        others = [one for one in file.link_directories if one.path != path and one not in gone]
        if len(others) >= DIRECTORIES_MAX:
            raise LimitExceeded(f"{len(others)} directories already hold links to {run}", hint="remove some of them")
        if link_directory in file.link_directories and len(others) == len(file.link_directories) - 1:
            return file
        return file.model_copy(update={"link_directories": (*others, link_directory)})

    files.change(run, act)


def standing(file: RunFile, run: str) -> LinkedSteps:
    """The present links."""
    links: dict[int, str] = {}
    unseen: list[str] = []
    for directory in file.link_directories:
        try:
            here = _limited(directory.path, partial(_seen, directory, run))
        except OSError:
            here = None
        if here is None:
            unseen.append(directory.path)
        else:
            links = {**here, **links}
    return LinkedSteps(links, tuple(unseen))


def _limited(path: str, look: Callable[[], _Seen]) -> _Seen:
    """The result of `look` at this path; `TimeoutError` if it takes too long, at once if an earlier one still hangs.

    On a disk whose server is away, a look may never return: it runs in a thread of its own, without blocking callers.
    """
    with _hanging_lock:
        if path in _hanging:
            raise TimeoutError(path)
    done: Future[_Seen] = Future()

    def run() -> None:
        try:
            done.set_result(look())
        except Exception as error:
            done.set_exception(error)
        with _hanging_lock:
            _hanging.discard(path)

    threading.Thread(target=run, name="holdfast-link-look", daemon=True).start()
    try:
        return done.result(LOOK_S)
    except FutureTimeout:
        if done.done():  # it took as long as that, or has failed by a time limit of its own
            return done.result()
    with _hanging_lock:
        if not done.done():
            _hanging.add(path)
    raise TimeoutError(path)


def _seen(directory: LinkDirectory, run: str) -> dict[int, str] | None:
    """The links in a directory, by step; None if it cannot be read."""
    try:
        here = {step: path for path, step in _links(directory.path, run)}
        away = not here and Path(directory.path).stat().st_dev != directory.device  # what was mounted there
    except OSError:
        return {} if _is_gone(directory) else None
    return None if away else here


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


def _is_known_to_be_gone(directory: LinkDirectory) -> bool:
    try:
        return _limited(directory.path, partial(_is_gone, directory))
    except OSError:
        return False


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
