"""The interface of a store of checkpoints, above `Tier`: what a save needs of any storage.

It has no directories, renames or random writes, so that an object store can implement it. Every store must pass the tests in
`tests/suites/store_suite.py`. A raised failure (`NoSpace`, `StorageFailed`, `InvalidRequest`) has made nothing visible; what
may have become visible is returned as a value, `Publication`.

A run goes to the trash and comes back as a whole, by one call, because control files and checkpoints must move together.

Decisions: a commit may also find its round `gone`, which is neither taken nor unknown. A place with a round is shared by
nodes, and one without has a single writer, which begins with it empty, so that no flag is needed. Files are written through
a `FileWriter`, because threads write them at the same time. Removal has two halves, because the wait for readers needs a
lock, and freeing bytes does not. The sweep takes the live rounds and a time without writes, because a round may begin
between the question and the sweep. `put_back` is for file systems that cannot exchange names. A job resumes in a place with
a round, whose name follows from its work: it drops what is not finished. `mend` is no commit `over` the damaged checkpoint,
because a file system without hard links would copy all of it for one bad byte, and would keep the damaged one until the
other is read back; a store that cannot replace one object takes the other files into `place`, and commits that. A store
states in `shares_files` whether several nodes can fill one file, because parts of an object cannot be of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_formats.rest.bodies import CheckpointInfo

from .tier import FileIdentity, FileWriter

Alone = Callable[[str], AbstractContextManager[object]]


class CommitContents(NamedTuple):
    """A checkpoint to publish: the sizes of the staged files, the small files added now, their manifest, and COMMIT with the
    manifest's digest.
    """

    staged: Mapping[str, int]
    small: Mapping[str, bytes]
    manifest: bytes
    commit: bytes


class Publication(NamedTuple):
    """The result of a commit.

    `published`: these bytes are published, durably, perhaps by another committer of the same round. `taken`: another
    checkpoint is there, and stays. `gone`: staged files are missing: the round has ended some other way. `unknown`: these
    bytes may be published, and may not survive a power cut: look again later, discard nothing (I9).
    """

    outcome: Literal["published", "taken", "gone", "unknown"]
    detail: str = ""


class StagedFiles(Protocol):
    """New files that become visible together, later. Threads may write at the same time."""

    @property
    def files(self) -> Files:
        """Reads the finished ones, as `path`/FILE; those of a store read all that its `files` do."""

    @property
    def path(self) -> str: ...

    def create(self, file: str, size: int) -> FileWriter:
        """A file with room for `size` bytes. In a round of several nodes each may create it, to write its own ranges, if the
        store `shares_files`; it is complete once each has finished.

        Every byte is written once. A writer with several threads hands out ranges in order, so that a store without random
        writes may make a thread wait for the bytes before its own. Ranges of nodes begin and end at multiples of a block.
        """

    def put(self, file: str, data: bytes) -> None:
        """A small file, as a whole. In a round of several nodes it may exist from an earlier boot of this node."""

    def drop(self, file: str) -> None:
        """Remove a file, finished or not, so that it can be written again; a missing one is fine."""

    def clear(self) -> None:
        """Remove all files; what was published from here stays."""

    def sync(self, file: str) -> None:
        """Make the name of a finished file durable now, for a record that says it is there; a commit does it for all."""


class StagedCheckpoint(StagedFiles, Protocol):
    """The files of one try to save a step, or of a job that makes a checkpoint."""

    @property
    def place(self) -> Place: ...

    def go_on(self) -> dict[str, int]:
        """The sizes of the files that an earlier start of this job has left here, durable but not proven: one may be
        incomplete at its full size. Each can be created again, which replaces it.

        From now on a file that is discarded before it is finished may leave what a later start goes on with, which is proven
        to be what that start writes.
        """

    def take(self, file: str, step: int, run: str | None = None) -> bool:
        """Put a file of a committed checkpoint here, by default of this run, without its bytes passing through this
        process: as a second name, or as a copy that the storage makes itself. False if it can do neither.
        """

    def put_receipt(self, node: str, data: bytes) -> None:
        """A node's list of durable files, for the commit; not part of the checkpoint."""


class Store(Protocol):
    """Checkpoints of many runs, and staged saves. Used by several nodes at once."""

    @property
    def shares_files(self) -> bool:
        """Whether several nodes of a round can fill one file. If not, a file is one node's to write."""

    @property
    def files(self) -> Files:
        """Files of committed checkpoints, by their paths `RUN/checkpoints/step-N/FILE`; and of a place that this store has
        begun, or that `replaced` has named, as `PLACE.path/FILE`.
        """

    def begin(self, place: Place) -> StagedCheckpoint:
        """Begin a save. An earlier try's files at a place without a round are removed: no other node writes there."""

    def receipts(self, place: Place) -> list[bytes]:
        """What `put_receipt` was given."""

    def commit(self, place: Place, contents: CommitContents, over: bool = False) -> Publication:
        """Make what is staged a checkpoint, complete and durable (I1): small files, manifest, then COMMIT (I3); atomically.

        Another checkpoint of the step stays, or is replaced with `over`: readers find one or the other. The replaced one is
        kept until `release`, since the new one is not verified yet. Of two nodes that commit the same round, both succeed
        (I12). If a result is lost, the published bytes are read (I14).
        """

    def mend(self, place: Place, manifest: bytes, commit: bytes) -> None:
        """Repair a checkpoint (I4): the files that are staged at `place` replace those of their names, its manifest and
        COMMIT become these, and all others stay. `NoSuchCheckpoint` without one.

        Durable when this returns. A failure leaves each file as it was or replaced, and what is staged can be discarded.
        """

    def steps(self, run: str) -> list[int]:
        """Steps with a directory, ascending, sound or not."""

    def described(self, run: str, steps: Collection[int]) -> Mapping[int, CheckpointInfo]:
        """What these checkpoints' manifests say, of those of which the storage says it for less than a manifest costs."""

    def stamps(self, run: str, step: int | None = None) -> dict[int, str]:
        """For each step, or one, with COMMIT and manifest: a text that changes when one of them does, computed without
        reading.
        """

    def identities(self, path: str) -> Mapping[str, FileIdentity]:
        """For each file of a checkpoint, or of a place begun here, by their `path`: which bytes it is a name of. Empty where
        every file has bytes of its own.
        """

    def discard(self, place: Place) -> None:
        """Abandon what is staged at a place: it can no longer be committed. What was published from there stays."""

    def job_places(self, run: str) -> list[Place]:
        """Places where jobs of a run have begun to stage files. Those of published checkpoints may be among them."""

    def replaced(self, run: str) -> list[Place]:
        """Places of checkpoints that were, or are being, replaced by others of their steps."""

    def release(self, place: Place) -> str | None:
        """Remove a replaced checkpoint for good; `free` of the returned name frees its bytes."""

    def take_back(self, place: Place) -> str | None:
        """Put a replaced checkpoint back in place of the published one, if any; returns that, as `release` does."""

    def remove(self, run: str, step: int) -> str:
        """Unpublish a checkpoint, durably (I4, I8), and what it replaced; `free` frees their bytes. `NoSuchCheckpoint`
        without one.
        """

    def bring_back(self, run: str, step: int, removed: str) -> bool:
        """Undo a `remove` whose bytes still exist; False if another checkpoint has taken its place."""

    def free(self, removed: str) -> None:
        """Free the bytes of what `remove`, `release` or `take_back` has returned, but not those of a checkpoint that was
        published from the same place since.
        """

    def put_away(self, run: str, entry: str) -> None:
        """Move a whole run, with its control files, into the root's trash under this name, durably. At every moment it is
        complete in one of the two places. `AlreadyCommitted` if the entry exists, `NoSuchResource` without the run.
        """

    def take_out(self, entry: str, run: str) -> None:
        """The way back. `NoSuchResource` if the entry is gone or purged, `AlreadyCommitted` if a run has this name."""

    def purge(self, entry: str) -> bool:
        """Give an entry of the trash up, durably: nothing of it can be taken out any more. False if it is gone, or was
        purged before.
        """

    def free_purged(self) -> list[tuple[str, CheckpointError]]:
        """Free the bytes of purged entries; returns those of which some are left for the next call."""

    def free_bytes(self) -> int | None:
        """Bytes that may still be written here; None if the storage states no limit."""

    def put_back(self, alone: Alone) -> list[str]:
        """At start, before the sweep: repair a crash between two steps of a replacement; returns the repairs.

        `alone(run)` keeps other nodes from replacing checkpoints of a run. A store that replaces atomically does nothing.
        """

    def sweep(self, live: Collection[Place] = (), idle_s: float | None = None) -> list[str]:
        """Remove what will never be a checkpoint, and the rest of removed ones; returns them, in order. What may have been
        replaced by the step's present checkpoint is kept until `release`: only verification shows which one is sound.

        Files of a `live` place stay. With other nodes writing, so do files written within `idle_s`, by the storage's own
        clock: they may have begun since the live places were listed (I16, I17).
        """
