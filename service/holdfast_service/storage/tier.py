"""The interface of a directory for checkpoints. Every tier must pass the tests in `tests/suites/tier_suite.py`.

Paths are relative POSIX paths below the tier's root; `""` is the root itself where a directory is expected. No symbolic link
below the root is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest

from .records import Records

THE_DIRECTORY = "the directory"  # `label` of a tier: callers name its root themselves, and not to everyone

Buffer = bytes | bytearray | memoryview | NDArray[Any]


class FileIdentity(NamedTuple):
    """The file behind a name: a text that all its `names` share, the number of these, and its length."""

    id: str
    names: int
    bytes: int


class FileWriter(Protocol):
    """A new file while it is written. Writes to disjoint ranges may come from several threads at once."""

    @property
    def alignment(self) -> int:
        """Writes whose offset, length and memory are multiples of this bypass any cache; 1 if it makes no difference."""

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write every byte of the buffers, one after the other from `offset` on, inside the size the file was made with."""

    def finish(self) -> None:
        """Make the bytes durable and close. After a failure the file is closed too, and is never made durable (I9)."""

    def discard(self) -> None:
        """Close without a promise about the bytes; does nothing on a closed file."""


class Tier(Records, Protocol):
    """A directory for checkpoints and control files. Failures are those of `Records`."""

    def create(self, path: str, size: int) -> FileWriter:
        """A new file with room for `size` bytes; parents are made. `StorageFailed` if something exists at `path`."""

    def join(self, path: str, size: int) -> FileWriter:
        """A file with room for `size` bytes that writers of several nodes fill, each its own ranges; created if missing.

        It is complete once every writer has finished. Ranges begin and end at multiples of the page size, or at its end.
        """

    def put(self, path: str, data: bytes) -> None:
        """A new small file, durable when this returns (its name is durable after `sync_directory`)."""

    def sync_directory(self, path: str) -> None:
        """Make the names in this directory durable, and the path to it from the root."""

    def publish(self, source: str, target: str) -> None:
        """Rename a directory; `AlreadyCommitted` when `target` is taken. Durable when this returns.

        A failure after the rename carries the member `outcome="unknown"` (I9).
        """

    def exchange(self, source: str, target: str) -> bool:
        """Exchange the names of two directories, atomically; durable when this returns. False if that is not possible.

        A failure after the exchange carries the member `outcome="unknown"` (I9).
        """

    def supplant(self, source: str, target: str) -> None:
        """Replace or create a file from a durable one, atomically; durable there when this returns.

        Readers that have the old one open keep reading that.
        """

    def link(self, source: str, target: str) -> bool:
        """A second name for a file, which is never written to again; parents are made. False if the storage has none.

        The name is durable after `sync_directory`. `StorageFailed` if something exists at `target`.
        """

    def identities(self, path: str) -> dict[str, FileIdentity]:
        """The identity of each file directly in a directory, by its name there; empty for anything else."""

    def stamps(self, path: str, names: Sequence[str]) -> dict[str, str]:
        """For this directory, as `""`, and each subdirectory that holds files of all these names: a text, computed without
        reading them, that changes when one of the files is written, replaced or made again.

        Returns None for anything but a directory.
        """

    def remove_tree(self, path: str) -> None:
        """Remove whatever is at `path` and below it; a missing path is fine. Of a symbolic link only the link is removed."""

    def hold(self, path: str) -> AbstractContextManager[None]:
        """Hold a name exclusively, on all machines; parents are made. `InUse` if it is held. It is freed at the end of the
        context, or of the process, however it ends.

        A file may exist there meanwhile, and after a process was killed; it means nothing by itself.
        """

    def idle_s(self, path: str) -> float:
        """Seconds since something in this directory or below it was last written or made, by the storage's clock; 0 if it is
        missing.
        """

    def free_bytes(self) -> int:
        """Bytes that may still be written here."""


def octets(buffer: Buffer) -> memoryview:
    """The buffer's bytes, flat and not copied; `InvalidRequest` for one that is not contiguous."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidRequest("only contiguous arrays can be stored")
        buffer = buffer.reshape(-1).view(np.uint8).data
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def check_range(path: str, offset: int, length: int, size: int) -> None:
    """Refuse bytes outside the size that a file was made with."""
    if offset < 0 or offset + length > size:
        raise InvalidRequest(f"{path}: {length} bytes at {offset} do not fit the file of {size} bytes")
