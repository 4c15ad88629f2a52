"""The check of a checkpoint that several nodes read back together, in portions.

A portion is a set of ranges. Ranges count bytes from the first file of the manifest to the last, as if the files were
concatenated. A piece belongs to the portion that has its first byte, so portions need no piece boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]  # [begin, end)


class PortionPlan(NamedTuple):
    """The ranges that one node reads. `reader` is the node that takes it first; None: any."""

    spans: tuple[Span, ...]
    reader: str | None

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in self.spans)


class CheckedCheckpoint(NamedTuple):
    """The checkpoint that is checked; the SHA-256 of its manifest distinguishes checkpoints of one step. Statistics are
    compared with the step `before`; None if they are not, or not wanted (`examine`).
    """

    run: str
    step: int
    sha256: str
    before: int | None
    examine: bool


class Portion(NamedTuple):
    """A portion that this node has claimed; a later `claim` number ends it. `mine`: this node began the check, because
    it committed the checkpoint; otherwise `age_s` seconds ago.
    """

    of: CheckedCheckpoint
    number: int
    claim: int
    spans: tuple[Span, ...]
    mine: bool
    age_s: float


class PortionFound(NamedTuple):
    """A checked portion's statistics (may be empty), and the sources of repairs."""

    node: str
    statistics: bytes
    repaired: Sequence[str]


class CheckEnding(NamedTuple):
    """The end of a check, claimed by this node: all portions are verified. `mine` and `age_s` as in a portion."""

    of: CheckedCheckpoint
    claim: int
    found: Sequence[PortionFound]
    mine: bool
    age_s: float


class CheckProgress(NamedTuple):
    """Bytes of a running check that all nodes have read."""

    done: int
    total: int
