"""Files of a bucket by the paths that they have in a directory: `RUN/checkpoints/step-N/FILE`, and control files.

A checkpoint's path leads, by the step's commit object, to `RUN/data/PREFIX/FILE`. The commit object is read when COMMIT is
asked for, with which reading begins (I5), and remembered for the step's other files: they are those of the COMMIT that was
read last, also while another node replaces the checkpoint. When a file is not there, the commit object is read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from errno import ENOENT
from typing import Any, NamedTuple, TypeVar

from holdfast_formats import naming
from holdfast_formats.errors import LimitExceeded, NoSuchResource
from holdfast_formats.files import check_position, split_leaf, split_path

from . import commit_objects
from .client import Bucket, Found
from .commit_objects import COMMIT_OBJECT_BYTES_MAX, CommitObject

REMEMBERED_MAX = 4096  # commit objects; more are read again
_HIDDEN = frozenset({naming.DATA, naming.COMMITS, naming.LINES})
_Result = TypeVar("_Result")


class TaggedCommit(NamedTuple):
    """A commit object, and the ETag of the same answer."""

    content: CommitObject
    etag: str


def read_commit_object(bucket: Bucket, run: str, step: int) -> TaggedCommit | None:
    """The step's commit object; None without one. `CorruptManifest` if it cannot be read or is too long to be one."""
    path = naming.commit_object_path(run, step)
    try:
        data, etag = bucket.read_tagged(path, COMMIT_OBJECT_BYTES_MAX)
    except NoSuchResource:
        return None
    except LimitExceeded as error:
        raise commit_objects.damaged(path, error.detail) from error
    return TaggedCommit(commit_objects.decode(data, run, step), etag)


class _FileOfStep(NamedTuple):
    """A path below `RUN/checkpoints/`: `file` is empty for the step's directory itself."""

    run: str
    step: int
    file: str


class ObjectFiles:
    """The files of one root in a bucket; satisfies `Files`. `CorruptManifest` names a commit object that cannot be read."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._remembered: dict[tuple[str, int], str] = {}  # by run and step, the name of the prefix
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return self._bucket.label

    def size(self, path: str) -> int | None:
        split_leaf(path)
        found = self._found(path)
        return None if found is None else found.size

    def stamp(self, path: str) -> str:
        split_leaf(path)
        found = self._found(path)
        return "" if found is None else f"{found.size:x}.{found.etag}.{found.modified:.0f}"

    def list(self, path: str) -> list[str]:
        names = split_path(path)
        if len(names) == 2 and names[1] == naming.CHECKPOINTS and naming.is_run_name(names[0]):
            return [
                name
                for name in _names_in(self._bucket, f"{names[0]}/{naming.COMMITS}")
                if naming.parse_step_directory(name) is not None
            ]
        if (of_step := _of_step(names)) is not None:
            try:
                prefix = self._prefix(of_step, fresh=not of_step.file)
            except NoSuchResource:
                return []
            return _names_in(self._bucket, f"{prefix}/{of_step.file}" if of_step.file else prefix)
        found = _names_in(self._bucket, "/".join(names))
        if len(names) == 1 and naming.is_run_name(names[0]):
            checkpoints = [naming.CHECKPOINTS] if naming.COMMITS in found else []
            found = sorted([*(name for name in found if name not in _HIDDEN), *checkpoints])
        return found

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_position(path, offset, length or 0)
        split_leaf(path)
        return self._at(path, lambda key: self._bucket.read(key, offset, length))

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        check_position(path, offset, 0)
        split_leaf(path)
        return self._at(path, lambda key: self._bucket.read_into(key, offset, buffer))

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self.read_into(path, offset, buffer)  # nothing is cached on this side

    def key(self, path: str) -> str:
        """The key of a file now, for what is asked of the bucket itself; `NoSuchResource` if its step has no checkpoint."""
        of_step = _of_step(split_path(path))
        return path if of_step is None else f"{self._prefix(of_step, fresh=True)}/{of_step.file}"

    def forget(self, run: str, step: int) -> None:
        """Read the step's commit object again when one of its files is asked for: this process has changed it."""
        with self._lock:
            self._remembered.pop((run, step), None)

    def forget_all(self) -> None:
        """`forget` for all steps."""
        with self._lock:
            self._remembered.clear()

    def _found(self, path: str) -> Found | None:
        """Size, ETag and time of a file; None if there is none."""

        def head(key: str) -> Found:
            found = self._bucket.head(key)
            if found is None:
                raise _no_file(path)
            return found

        try:
            return self._at(path, head)
        except NoSuchResource:
            return None

    def _at(self, path: str, act: Callable[[str], _Result]) -> _Result:
        """`act` with the key of a file; `NoSuchResource` if there is none."""
        of_step = _of_step(split_path(path))
        if of_step is None:
            try:
                return act(path)
            except NoSuchResource as error:
                raise _no_file(path) from error
        if not of_step.file:
            raise NoSuchResource(f"{path} is not a file", path=path)
        prefix = self._prefix(of_step, fresh=of_step.file == naming.COMMIT)
        try:
            return act(f"{prefix}/{of_step.file}")
        except NoSuchResource as error:
            again = self._prefix(of_step, fresh=True)
            if again == prefix:
                raise _no_file(path) from error
            return act(f"{again}/{of_step.file}")

    def _prefix(self, of_step: _FileOfStep, fresh: bool) -> str:
        """The prefix of the step's files; `NoSuchResource` if the step has no checkpoint."""
        at = of_step.run, of_step.step
        name = None if fresh else self._remembered.get(at)
        if name is None:
            found = read_commit_object(self._bucket, *at)
            with self._lock:
                if found is None:
                    self._remembered.pop(at, None)
                    raise NoSuchResource(f"{of_step.run} has no checkpoint of step {of_step.step}", errno=ENOENT)
                if len(self._remembered) >= REMEMBERED_MAX:
                    self._remembered.clear()
                name = self._remembered[at] = found.content.checkpoint.data
        return f"{of_step.run}/{naming.DATA}/{name}"


def _no_file(path: str) -> NoSuchResource:
    """Nothing has this name: no list needs to say whether something else than a file has it."""
    return NoSuchResource(f"there is no file {path}", path=path, errno=ENOENT)


def _names_in(bucket: Bucket, directory: str) -> list[str]:
    top = f"{directory}/" if directory else ""
    names = set[str]()
    for page in bucket.pages(top, delimiter="/"):
        names.update(one.key.removeprefix(top) for one in page.objects)
        names.update(prefix.removeprefix(top).rstrip("/") for prefix in page.prefixes)
    return sorted(names - {""})


def _of_step(names: list[str]) -> _FileOfStep | None:
    """The names of a path below a run's checkpoints; None for any other path."""
    if len(names) < 3 or names[1] != naming.CHECKPOINTS or not naming.is_run_name(names[0]):
        return None
    step = naming.parse_step_directory(names[2])
    return None if step is None else _FileOfStep(names[0], step, "/".join(names[3:]))
