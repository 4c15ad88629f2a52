"""The interface of a store of checkpoints, above `Tier`: what a save needs of storage, whatever storage is.

It knows no directory, no rename and no random write, so that an object store can have it too. Every store must pass the
tests in `tests/suites/store_suite.py`. A failure that is raised (`NoSpace`, `StorageFailed`, `InvalidRequest`) has made
nothing visible; what may have become visible is said by a value, `Publication`.

What building changed in the design: a commit may also find its round `gone`, which is neither taken nor unknown. A
place with a round is shared by nodes, and one without has a single writer, who begins with it empty, so that nothing
needs a flag. Files are written through a `FileWriter`, because threads write them at the same time. Removal has two
halves, because a reader is waited for under a lock, and bytes are freed without it. The sweep takes the live rounds and
a time in which nobody has written, because a round may begin between the question and the sweep. `put_back` is there
for file systems that cannot exchange names. An object store has to say whether several nodes can fill one object; if
they cannot, the planner gives whole files to nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from holdfast_formats.naming import Place

from .tier import FileWriter, Readable

Alone = Callable[[str], AbstractContextManager[object]]


class CommitContents(NamedTuple):
    """A checkpoint as it is to stand: the sizes of the files that were staged, the small files that are added now, the
    manifest of them all, and COMMIT, which vouches for the manifest.
    """

    staged: Mapping[str, int]
    small: Mapping[str, bytes]
    manifest: bytes
    commit: bytes


class Publication(NamedTuple):
    """What came of a commit.

    `published`: these bytes stand, durably; another committer of the same round may have put them there. `taken`: another
    checkpoint stands there, and stays. `gone`: what was staged is not there, or not all of it: the round has ended some
    other way. `unknown`: these bytes may stand, and may not outlast a power cut: look again later, discard nothing (I9).
    """

    outcome: Literal["published", "taken", "gone", "unknown"]
    detail: str = ""


class StagedCheckpoint(Protocol):
    """What is written for one try to save a step. Nobody sees it before the commit. Threads may write at the same time."""

    @property
    def place(self) -> Place: ...

    def create(self, file: str, size: int) -> FileWriter:
        """A file with room for `size` bytes. Of a round of several nodes each may create it, to write ranges of its own; it
        has all bytes once each has finished.

        Every byte is written once. Who writes with several threads hands out ranges in order, so that a store without random
        writes may let a thread wait for the bytes before its own. Ranges of nodes begin and end at multiples of a block.
        """

    def put(self, file: str, data: bytes) -> None:
        """A small file, as a whole. In a round of several nodes it may be there from an earlier boot of this node."""

    def take(self, file: str, step: int) -> bool:
        """Have a file of a committed checkpoint of this run stand here too, uncopied; False if that is not possible."""

    def put_receipt(self, node: str, data: bytes) -> None:
        """What a node has made durable, for the commit; no part of the checkpoint."""


class Store(Protocol):
    """Checkpoints of many runs, and what is written to become one. Used by several nodes at once."""

    @property
    def files(self) -> Readable:
        """Files of committed checkpoints, by their paths `RUN/checkpoints/step-N/FILE`."""

    def begin(self, place: Place) -> StagedCheckpoint:
        """Write a save. What an earlier try left at a place without a round is removed: nobody else writes there."""

    def receipts(self, place: Place) -> list[bytes]:
        """What `put_receipt` was given."""

    def commit(self, place: Place, contents: CommitContents, over: bool = False) -> Publication:
        """Make what is staged a checkpoint, complete and durable (I1): small files, manifest, then COMMIT (I3); one stroke.

        Another checkpoint of the step stays, or if this is to be put `over` it, is replaced: readers find one or the other.
        The replaced one is kept until `release`, since what stands there now was not read back yet.
        Of two nodes that commit the same round, both succeed (I12). Where an answer is lost, what stands is read (I14).
        """

    def steps(self, run: str) -> list[int]:
        """The steps at which something stands, ascending, sound or not."""

    def stamps(self, run: str, step: int | None = None) -> dict[int, str]:
        """Of each step, or of one, that has COMMIT and manifest: a text that changes when one of them does, made without
        reading them.
        """

    def discard(self, place: Place) -> None:
        """Give up what is staged at a place: from now on it cannot be committed."""

    def replaced(self, run: str) -> list[Place]:
        """Where checkpoints are kept that were replaced by others of their steps, or are being replaced."""

    def release(self, place: Place) -> str | None:
        """Take away for good what was replaced; its bytes are there until `free` gets what this returns."""

    def take_back(self, place: Place) -> str | None:
        """Put what was replaced in the place of what stands there, if anything does; returns that, as `release` does."""

    def remove(self, run: str, step: int) -> str:
        """Take a checkpoint away, durably (I4, I8), and what it has replaced; its bytes are there until `free`.
        `NoSuchCheckpoint` without one.
        """

    def bring_back(self, run: str, step: int, removed: str) -> bool:
        """Undo a `remove` whose bytes are there yet; False where another checkpoint has taken its place."""

    def free(self, removed: str) -> None:
        """Free the bytes of what `remove`, `release` or `take_back` has returned."""

    def put_back(self, alone: Alone) -> list[str]:
        """At start, before the sweep: put right what a crash left between two steps of a replacement; says what was.

        `alone(run)` keeps other nodes from replacing checkpoints of a run. A store that replaces at one stroke has nothing
        to do.
        """

    def sweep(self, live: Collection[Place] = (), idle_s: float | None = None) -> list[str]:
        """Remove what will never be a checkpoint, and what is left of removed ones; returns what that was, in order. What
        may have been replaced by what stands at its step is kept until `release`: only a look can tell which one is sound.

        What is at a `live` place stays. Where other nodes write, also what was written to within `idle_s`, by the storage's
        own clock: they may have begun since the live places were asked for (I16, I17).
        """
