"""What a root is for a reader: runs and their checkpoints as they are stored, without a service (I5).

Options and arguments are parsed here, so no other module asks whether a root is a directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from holdfast.read.sources import Source
    from holdfast_formats.lineage import Key
    from holdfast_formats.rest.bodies import CheckpointInfo

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CheckpointRoot(Protocol):
    """Interface: a root. Making one reads nothing, so that the parser of an option can make it."""

    parallel: int  # how many small files are read at a time

    @property
    def label(self) -> str:
        """The place, as messages name it."""

    def runs(self) -> list[str]:
        """The runs, by name; `StorageFailed` if there is no root."""

    def steps(self, run: str) -> list[int]:
        """The steps of a run, newest first, readable or not; `NoSuchRun`, or `StorageFailed` if there is no root."""

    def committed_steps(self, run: str) -> list[int]:
        """The committed steps, newest first; empty if the run does not exist."""

    def published_steps(self, run: str) -> list[int]:
        """The committed steps, and those that were committed and are damaged since, newest first."""

    def has(self, run: str, step: int) -> bool:
        """Whether there is a checkpoint, or what is left of one."""

    def source(self, run: str, step: int) -> Source:
        """The files of a checkpoint, which may not exist."""

    def described(self, run: str, step: int) -> CheckpointInfo | None:
        """What a checkpoint's manifest says, where the root says it for less than a manifest costs; None: read that."""
        return None

    def lines(self, run: str) -> Mapping[int, Key]:
        """The lines of checkpoints by their steps, of those of which the root says it in a list."""
        return {}

    def close(self) -> None:
        """End connections; the root can still be used, and opens them again."""


def root_of(given: str | os.PathLike[str]) -> CheckpointRoot:
    """The root that an option or an argument names; `InvalidRequest` for an address of no root, which is not shown where it
    has a password in it.
    """
    from holdfast.read.bucket_root import BucketRoot
    from holdfast.read.directory_root import DirectoryRoot
    from holdfast_files.objects import address
    from holdfast_formats.root_files import check_local  # pydantic, which completion does not wait for

    text = os.fspath(given)
    if address.is_address(text):
        return BucketRoot(address.parse(text))
    check_local(text)
    return DirectoryRoot(Path(text))


def mapped(root: CheckpointRoot, act: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """The results in order, as many at a time as the root reads well."""
    count = min(root.parallel, len(items))
    if count <= 1:
        yield from map(act, items)
        return
    with ThreadPoolExecutor(count, "holdfast-list") as threads:
        yield from threads.map(act, items)
