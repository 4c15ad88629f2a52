"""The check of a checkpoint that several nodes read back together, in portions, as its nodes see it.

A portion is a set of ranges. Ranges count bytes from the first file of the manifest to the last, as if the files stood one
behind the other. A piece belongs to the portion that has its first byte, so portions need not know about pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]  # [begin, end)


class PortionPlan(NamedTuple):
    """What one node is to read of a checkpoint. `reader` is the node that takes it first; None: any."""

    spans: tuple[Span, ...]
    reader: str | None

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in self.spans)


class CheckedCheckpoint(NamedTuple):
    """Which checkpoint is checked: the SHA-256 of its manifest tells it from another one of the same step. Its statistics
    are compared with the step `before`; None where they are not, or not wanted (`examine`).
    """

    run: str
    step: int
    sha256: str
    before: int | None
    examine: bool


class Portion(NamedTuple):
    """A portion that this node has claimed. `claim` is the number of the claim: a later one ends it. `mine`: this node began
    the check, since it has committed the checkpoint; else it did so `age_s` seconds ago.
    """

    of: CheckedCheckpoint
    number: int
    claim: int
    spans: tuple[Span, ...]
    mine: bool
    age_s: float


class PortionFound(NamedTuple):
    """What proving a portion has brought: statistics (empty where there are none), and where damage was repaired from."""

    node: str
    statistics: bytes
    repaired: Sequence[str]


class CheckEnding(NamedTuple):
    """The end of a check, claimed by this node: all portions are proven. `mine` and `age_s` as of a portion."""

    of: CheckedCheckpoint
    claim: int
    found: Sequence[PortionFound]
    mine: bool
    age_s: float


class CheckProgress(NamedTuple):
    """How many of the bytes of a check that goes on have been read, by all nodes."""

    done: int
    total: int
