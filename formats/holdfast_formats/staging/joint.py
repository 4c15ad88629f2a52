"""A node's view of a save whose ranks are on several nodes (a joint round)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast_formats.naming import Place
from holdfast_formats.staging.plan import Receipt


class JointPart(NamedTuple):
    """A node's part as seen by others. `live`: this boot of the node is a member. `known`: some boot of it is."""

    node: str
    ranks: tuple[int, ...]
    live: bool
    known: bool
    url: str
    delivered: bool


class ShareHandover(NamedTuple):
    """A share that its `node` cannot write, because of the `problem`. The `helper`, if any, writes it instead.
    `overdue`: the other nodes were silent about it for too long, by the database's clock.
    """

    node: str
    problem: Mapping[str, Any]
    helper: str | None
    overdue: bool


class RoundState(NamedTuple):
    """A round's progress: how many of its `world` ranks have delivered their part, and whether all nodes have
    `written`; `delivered`: the asking node has, or a helper for it.
    """

    state: str
    problem: Mapping[str, Any] | None
    world: int
    brought: int
    written: bool
    delivered: bool = False
    handover: ShareHandover | None = None


class JointRound(NamedTuple):
    id: int
    state: str
    created: str
    world: int
    parts: tuple[JointPart, ...]
    problem: Mapping[str, Any] | None
    handover: ShareHandover | None = None

    @property
    def missing(self) -> list[JointPart]:
        """Nodes that have not written their share."""
        return [part for part in self.parts if not part.delivered]

    @property
    def repeated(self) -> bool:
        """Whether two nodes have delivered the same rank."""
        brought = [rank for part in self.parts for rank in part.ranks]
        return len(brought) != len(set(brought))

    @property
    def absent(self) -> set[int]:
        """Ranks without a delivered part."""
        return set(range(self.world)) - {rank for part in self.parts for rank in part.ranks}


class Votes(NamedTuple):
    """Ranks whose restores of a turn have ended, as reported by their nodes; and damage found by one."""

    ranks: frozenset[int]
    problem: Mapping[str, Any] | None


class JointlyStaged(NamedTuple):
    """Files of a plan that several nodes have written at `place`: each node's part, and the round's begin."""

    place: Place
    receipts: Sequence[Receipt]
    created: str


Topic = Literal["stopping", "waiting"]  # where a launch stops; which of its ranks wait for a save


class RankReport(NamedTuple):
    """A node's statement on its ranks of a launch: the same from `since` until `until`, by the database's clock.
    `live`: this boot of the node is a member.
    """

    node: str
    said: Mapping[str, Any]
    since: float
    until: float
    live: bool


class AverageVote(NamedTuple):
    """A node's vote on the averages of its `ranks`, which have processed all updates before `number`. `history` is
    their history after it if all ranks deliver it, else empty. `folded` is the last update folded in.
    """

    ranks: tuple[int, ...]
    number: int
    history: str
    folded: int
