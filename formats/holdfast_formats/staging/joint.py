"""A save whose ranks are on several nodes (a joint round), as its nodes see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast_formats.naming import Place
from holdfast_formats.staging.plan import Receipt


class JointPart(NamedTuple):
    """A node's part as the others see it. `live`: this boot of the node is a member. `known`: some boot of it is."""

    node: str
    ranks: tuple[int, ...]
    live: bool
    known: bool
    url: str
    delivered: bool


class ShareHandover(NamedTuple):
    """A share that its `node` cannot write, because of the `problem`. The `helper` writes it instead, once there is one;
    `overdue`: the other nodes were silent about it for too long, by the database's clock.
    """

    node: str
    problem: Mapping[str, Any]
    helper: str | None
    overdue: bool


class RoundState(NamedTuple):
    """How far a round is: of how many of its `world` ranks the part was brought, and whether all nodes have `written`;
    `delivered`: the node that asks has, or another one for it.
    """

    state: str
    problem: Mapping[str, Any] | None
    world: int
    brought: int
    written: bool
    delivered: bool = False
    handover: ShareHandover | None = None


class JointRound(NamedTuple):
    """A round with its parts."""

    id: int
    state: str
    created: str
    world: int
    parts: tuple[JointPart, ...]
    problem: Mapping[str, Any] | None
    handover: ShareHandover | None = None

    @property
    def missing(self) -> list[JointPart]:
        """The nodes that have not written their share."""
        return [part for part in self.parts if not part.delivered]

    @property
    def repeated(self) -> bool:
        """Whether two nodes have brought the same rank."""
        brought = [rank for part in self.parts for rank in part.ranks]
        return len(brought) != len(set(brought))

    @property
    def absent(self) -> set[int]:
        """The ranks of which nobody has brought the part."""
        return set(range(self.world)) - {rank for part in self.parts for rank in part.ranks}


class Votes(NamedTuple):
    """Which ranks' restores of a turn have ended, as far as their nodes have said so; and the damage that one met."""

    ranks: frozenset[int]
    problem: Mapping[str, Any] | None


class JointlyStaged(NamedTuple):
    """The files of a plan that several nodes have written at `place`: what each wrote, and when the round began."""

    place: Place
    receipts: Sequence[Receipt]
    created: str


Topic = Literal["stopping", "waiting"]  # where a launch stops; which of its ranks wait for a save


class RanksWord(NamedTuple):
    """What a node says of its ranks of a launch: the same from `since` until `until`, by the database's clock. `live`: this
    boot of the node is a member.
    """

    node: str
    said: Mapping[str, Any]
    since: float
    until: float
    live: bool


class AverageVote(NamedTuple):
    """What a node says of the averages of its `ranks`: they have dealt with all updates before this `number`. If they all
    bring it, `history` is what theirs would be with it, else it is empty. `folded` is the last update that was folded in.
    """

    ranks: tuple[int, ...]
    number: int
    history: str
    folded: int
