"""Where a checkpointer's daemon and directory are, from what its caller gave: root, socket, url, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.wire import Outcome

from . import embedded
from .api import Api
from .config import DEFAULT_ROOT, default_socket
from .link import Link
from .reader import CheckpointReader
from .remote import RemoteLink
from .sources import DirectorySource, HttpSource
from .transport import Transport


class Place(NamedTuple):
    """At most one of these is set; with none, the user's daemon is tried first, then an embedded one on ./holdfast-data."""

    root: Path | None
    socket: Path | None
    url: str | None

    @property
    def directory(self) -> Path | None:
        """The root that can be read, or served by an embedded daemon, with no daemon answering."""
        if self.root is not None:
            return self.root
        return DEFAULT_ROOT if self.socket is None and self.url is None else None


def place(root: str | Path | None, socket: str | Path | None, url: str | None) -> Place:
    """`InvalidRequest` when more than one way to the daemon is given."""
    if sum(given is not None for given in (root, socket, url)) > 1:
        raise InvalidRequest("give one of root=, socket= and url=, not several")
    return Place(Path(root) if root is not None else None, Path(socket) if socket is not None else None, url)


def connect(
    where: Place, start: bool, on_outcome: Callable[[Outcome], None], on_lost: Callable[[CheckpointError], None]
) -> Transport:
    """A link to the daemon of this place, started if need be and `start` allows it; `DaemonGone` when there is none.

    Over its socket where that can be reached from here, else over HTTP: then the rank stages into memory of its own.
    """

    def link(path: Path) -> Link:
        return Link(path, on_outcome, on_lost, lambda: _next_socket(where, path))

    if where.socket is not None:
        return link(where.socket)
    if where.url is not None:
        near = _socket_of(where.url)
        try:
            return link(near) if near is not None else RemoteLink(where.url, on_outcome, on_lost)
        except DaemonGone:  # the socket is there, but not for us
            return RemoteLink(where.url, on_outcome, on_lost)
    candidates = [embedded.running_socket(where.directory)] if where.directory is not None else []
    if where.root is None:
        candidates.insert(0, _ours(default_socket()))
    for candidate in candidates:
        try:
            if candidate is not None:
                return link(candidate)
        except DaemonGone:
            continue
    if not start or where.directory is None:
        raise DaemonGone(f"no daemon serves {where.directory}", hint="start one with `holdfast serve`")
    return link(embedded.start(where.directory))


def _ours(path: Path) -> Path | None:
    """A socket that nobody told us of, unless its directory is somebody else's: under /tmp that could be anybody's."""
    try:
        owner = path.parent.stat().st_uid
    except OSError:
        return None
    return path if owner in (0, os.geteuid()) else None


def _next_socket(where: Place, path: Path) -> Path:
    """Where the daemon answers that follows the one at `path`. A daemon that trainers started, they start again."""
    if where.directory is None:
        return path
    if embedded.is_embedded(path):
        return embedded.start(where.directory)
    return embedded.running_socket(where.directory) or path


def _socket_of(url: str) -> Path | None:
    """The socket of the daemon at `url` if it is to be seen here: the very one, not another daemon's at the same path."""
    with Api(url) as api:
        nodes = api.nodes()
    for node in nodes:
        try:
            at = os.stat(node.socket) if node.socket is not None else None
        except OSError:
            continue
        if at is not None and node.socket_id in (None, naming.socket_id(at.st_ino, at.st_ctime_ns)):
            return Path(str(node.socket))
    return None


def open_checkpoint(root: Path | None, url: str | None, run: str, step: int) -> CheckpointReader:
    """The checkpoint, read from its directory where that can be seen, else over HTTP from the daemon."""
    directory = root / naming.checkpoint_path(run, step) if root is not None else None
    if directory is not None and (directory.is_dir() or url is None):
        if not directory.is_dir():
            raise NoSuchCheckpoint(f"{root} has no checkpoint {run}@{step}", hint="`holdfast ls` lists what there is")
        return CheckpointReader.open(DirectorySource(directory))
    if url is None:
        raise NoSuchCheckpoint(f"there is no way to read {run}@{step}: neither a directory nor an address is known")
    return CheckpointReader.open(HttpSource(Api(url), run, step))


def committed_steps(root: Path, run: str) -> list[int]:
    """The steps whose directories are committed, newest first; none when the run is not there."""
    directory = root / naming.check_run(run) / naming.CHECKPOINTS
    if not directory.is_dir():
        return []
    steps = (naming.parse_step_directory(entry.name) for entry in directory.iterdir() if (entry / naming.COMMIT).is_file())
    return sorted((step for step in steps if step is not None), reverse=True)
