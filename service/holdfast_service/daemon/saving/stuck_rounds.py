"""Finds saves that can never complete, because their missing ranks wait for other saves, or close.

With several nodes, each reports its ranks' parts and waits (`rank_report_exchange`). All nodes find the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging.joint import RankReport
from holdfast_service.daemon.saving.rounds import Participant, SaveRound

LISTED_MAX = 8
TOGETHER_S = 0.5  # what nodes say must have held on all of them at the same time for so long


class RankWait(NamedTuple):
    """A connected rank's wait, as in `Participant`."""

    rank: int
    newest: int | None
    awaits: int | None
    closing: bool


class OpenSaves(NamedTuple):
    """The open saves of a launch: by step, the ranks that deliver their parts, or have. Ranks that are not among `ranks` may
    still come.
    """

    world: int
    brought: Mapping[int, frozenset[int]]
    ranks: frozenset[RankWait]

    @classmethod
    def of(cls, rounds: Sequence[SaveRound], ranks: Collection[Participant]) -> OpenSaves:
        world = max((current.world for current in rounds), default=0)
        brought = {current.key.step: frozenset(current.sealed.keys() | current.leases.keys()) for current in rounds}
        return cls(world, brought, frozenset(RankWait(who.rank, who.newest, who.awaits, who.closing) for who in ranks))

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> OpenSaves:
        """Decode another node's report."""
        brought = {int(step): frozenset(ranks) for step, ranks in report["brought"].items()}
        return cls(report["world"], brought, frozenset(RankWait(*one) for one in report["ranks"]))

    def report(self) -> dict[str, Any]:
        """Encode for other nodes; equal states have equal reports."""
        ranks = sorted(self.ranks, key=lambda one: (one.rank, one.newest or -1))
        brought = {str(step): sorted(ranks) for step, ranks in self.brought.items()}
        return {"world": self.world, "brought": brought, "ranks": [list(one) for one in ranks]}

    def joined(self, others: Sequence[OpenSaves]) -> OpenSaves:
        brought: dict[int, frozenset[int]] = {}
        for one in (self, *others):
            for step, ranks in one.brought.items():
                brought[step] = brought.get(step, frozenset()) | ranks
        return OpenSaves(self.world, brought, self.ranks.union(*(one.ranks for one in others)))

    @property
    def is_waited_for(self) -> bool:
        """Whether a rank waits for one of these saves, or closes."""
        return any(one.closing or one.awaits in self.brought for one in self.ranks)

    def stuck(self) -> set[int]:
        """The steps of the saves that no rank can complete."""
        waiting: dict[int, list[RankWait]] = {}
        for one in self.ranks:
            waiting.setdefault(one.rank, []).append(one)
        left = set(self.brought)
        while True:
            may_end = {step for step in left if all(_may_come(waiting.get(rank, ()), left) for rank in self._missing(step))}
            if not may_end:
                return left
            left -= may_end

    def error_of(self, step: int) -> RoundAborted:
        """The error for such a save's ranks: the steps that each rank saved last."""
        steps: dict[int, set[int]] = {}
        for one in self.ranks:
            if one.newest is not None:
                steps.setdefault(one.newest, set()).add(one.rank)
        steps_text = ", ".join(f"step {step} by {_ranks(by)}" for step, by in sorted(steps.items())[:LISTED_MAX])
        return RoundAborted(
            f"step {step} lacks {_ranks(self._missing(step))}, waiting for another save or closing; last saved "
            f"were {steps_text}",
            hint="every rank must save the same steps; after a signal, agree on the step across ranks first",
        )

    def _missing(self, step: int) -> set[int]:
        return set(range(self.world)) - self.brought[step]


def held_together(words: Sequence[RankReport], node: str) -> list[RankReport]:
    """This node's report and those that were valid at the same time; empty while that is unknown."""
    own = next(word for word in words if word.node == node)
    held = [word for word in words if word.live and word.until >= own.since + TOGETHER_S]
    if own not in held or max(word.since for word in held) + TOGETHER_S > min(word.until for word in held):
        return []
    return held


def _may_come(here: Collection[RankWait], held: Collection[int]) -> bool:
    """Whether a rank may still deliver its part: a missing one may still be starting."""
    return not here or any(not one.closing and one.awaits not in held for one in here)


def _ranks(ranks: Collection[int]) -> str:
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:LISTED_MAX])) + (", …" if len(listed) > LISTED_MAX else "")
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"
