"""Identifies a root, whatever path leads to it, and parses a daemon's files in it.

A path is not enough: it may lead to another directory, in another container or since a root was moved or copied. The
directory's inode distinguishes it from every other one of this machine, a copy included; the id in it from every other root
ever served, since a daemon replaces a copied id.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast_formats import naming
from holdfast_formats.body import Body
from holdfast_formats.errors import InvalidRequest

FILE_BYTES_MAX = 2**16
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # a path has lost the second slash

_Model = TypeVar("_Model", bound=BaseModel)


class RootMark(Body):
    """A root as its id, "" if no daemon has served it, and its directory's numbers, None if only the id is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(max_length=64)
    device: int | None = None
    inode: int | None = None

    def is_of(self, other: RootMark) -> bool:
        """Whether all stated members are equal to the other one's."""
        if self.id != other.id:
            return False
        return self.inode is None or (self.device, self.inode) == (other.device, other.inode)


class RootFile(Body):
    """Contents of `.holdfast.root`: the root's id, and the inode of its directory, or the place of its bucket.

    `catalog` is the address, without the password, of the server that the daemons of several nodes share; None for a single
    daemon.
    """

    id: str = Field(min_length=1, max_length=64)
    inode: int  # 0 in a bucket
    place: str = ""  # of a bucket: its URL and prefix, as the daemons reach it
    catalog: str | None = None


class DaemonFile(Body):
    """Contents of `.holdfast.json`, which exists while a daemon serves the root, and after a kill."""

    pid: int
    socket: str
    url: str | None = None
    root: RootMark


def encode(content: BaseModel) -> bytes:
    return content.model_dump_json().encode() + b"\n"


def decode(kind: type[_Model], data: bytes) -> _Model | None:
    """The parsed file, None if it is not one of ours."""
    try:
        return kind.model_validate_json(data)
    except ValidationError:
        return None


def check_local(path: str | Path) -> None:
    """`InvalidRequest` for a URL such as s3://bucket/place, which as a path would be created below the current directory."""
    text = str(path)
    if url := _URL.match(text):
        shown = text if "@" not in text else f"{url[0]}…"  # there may be a password in it
        raise InvalidRequest(
            f"{shown} is a URL, not a directory on this machine",
            hint="give a local directory, or mount the storage; for a directory with such a name, give its absolute path",
        )


def check_root_place(path: Path) -> None:
    """`InvalidRequest` for a URL, and for a directory inside a run or a checkpoint, which are removed as a whole.

    Links are followed. An existing root is accepted: it may lie in another root and have a run called "checkpoints".
    """
    check_local(path)
    if (path / naming.ROOT_FILE).is_file():
        return
    path = path.resolve()
    for above in (path, *path.parents):
        within = _inside(above)
        if within:
            raise InvalidRequest(
                f"{path} cannot be a root: {'it' if above == path else above} is {within}",
                hint="pass the root, which is the directory that holds the runs",
            )


def check_output_place(path: Path) -> None:
    """`InvalidRequest` for an output file or directory inside a run or a checkpoint, and for a URL.

    It would be taken for a checkpoint of the run, be swept, or keep the checkpoint from being removed. Links are followed.
    """
    check_local(path)
    path = path.resolve()
    for above in (path, *path.parents):
        within = "" if above == path else _inside(above)
        if within or (above.name in _OF_RUNS and _is_root(above.parents[min(1, len(above.parents) - 1)])):
            where = f"{above} is {within}" if within else f"{above.parent} would become a run"
            raise InvalidRequest(f"{path} cannot be written: {where}", hint="choose a directory outside the checkpoint root")


_OF_RUNS = (naming.CHECKPOINTS, naming.STAGING, naming.TRASH)


def _inside(path: Path) -> str:
    """What Holdfast keeps in this directory; empty if nothing."""
    committed = (path / naming.COMMIT).is_file() and (path / naming.MANIFEST).is_file()
    return "a checkpoint" if committed else "the directory of a run" if _is_run(path) else ""


def _is_run(path: Path) -> bool:
    return (path / naming.CHECKPOINTS).is_dir() and _is_root(path.parent)


def _is_root(path: Path) -> bool:
    return any((path / name).is_file() for name in (naming.ROOT_FILE, naming.LOCK))
