"""Identify a root directory and find its daemon."""

from __future__ import annotations

import os
import socket as sockets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from holdfast_formats import naming
from holdfast_formats.root_files import FILE_BYTES_MAX, DaemonFile, RootFile, RootMark, decode

_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_Model = TypeVar("_Model", bound=BaseModel)


def mark(root: Path) -> RootMark | None:
    """The identity of a root directory, whatever its path; None if it does not exist."""
    try:
        at = os.stat(root)
    except OSError:
        return None
    file = _read(root / naming.ROOT_FILE, RootFile)
    return RootMark(id="" if file is None else file.id, device=at.st_dev, inode=at.st_ino)


def is_at(directory: Path, meant: RootMark) -> bool:
    """Whether the directory is exactly the expected root, not another one at the same path or a copy."""
    current = mark(directory)
    return current is not None and meant.inode is not None and meant.is_of(current)


def running_socket(root: Path) -> Path | None:
    """Socket of the local daemon that claims to serve `root`, or None. It may be gone; only connecting tells."""
    for file in _daemon_files(root):
        if is_at(root, file.root):
            return Path(file.socket)
    return None


def running_url(root: Path) -> str | None:
    """HTTP address of the local daemon that claims to serve `root`, or None. It may be gone; only connecting tells."""
    return next((file.url for file in _daemon_files(root) if is_at(root, file.root)), None)


def shared_catalog(root: Path) -> str | None:
    """The URL of the catalog that several nodes share for this root; None for other roots."""
    file = _read(root / naming.ROOT_FILE, RootFile)
    return None if file is None else file.catalog


def answers(socket: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(str(socket))
        except OSError:
            return False
    return True


def _daemon_files(root: Path) -> list[DaemonFile]:
    """Daemon files of this machine in `root`: the only one, or those of several whose daemons answer."""
    try:
        names = sorted(name for name in os.listdir(root) if naming.parse_daemon_file(name) is not None)
    except OSError:
        return []
    read = [(name, _read(root / name, DaemonFile)) for name in names]
    files = [(name, file) for name, file in read if file is not None and is_at(root, file.root)]
    if len(files) < 2:
        return [file for _, file in files]
    return [file for _, file in files if answers(Path(file.socket))]


def other_daemon(root: Path) -> str | None:
    """A message if the daemon file in `root` names a daemon that serves another directory; otherwise None."""
    file = _read(root / naming.DAEMON_FILE, DaemonFile)
    if file is None or is_at(root, file.root):
        return None
    return (
        f"{root} is a copy of another root: its daemon file names the socket {file.socket}, whose daemon "
        "serves another directory. That daemon is not used"
    )


def _read(path: Path, kind: type[_Model]) -> _Model | None:
    try:
        descriptor = os.open(path, _OLD_FILE)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        try:
            return decode(kind, file.read(FILE_BYTES_MAX))
        except OSError:
            return None
