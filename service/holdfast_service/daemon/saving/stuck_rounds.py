"""Finds saves that are never complete, because the ranks that they lack wait for the ends of other saves, or close."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast_formats.errors import RoundAborted
from holdfast_service.daemon.saving.rounds import Participant, SaveRound

LISTED_MAX = 8


def find(rounds: Sequence[SaveRound], ranks: Collection[Participant]) -> list[SaveRound]:
    """Those of an attempt's open rounds that no rank can complete. `ranks` are its connected ones; all others may come."""
    waiting: dict[int, list[Participant]] = {}
    for who in ranks:
        waiting.setdefault(who.rank, []).append(who)
    left = list(rounds)
    while True:
        held = {current.key.step for current in left}
        may_end = [r for r in left if all(_may_come(waiting.get(rank, ()), held) for rank in _missing(r))]
        if not may_end:
            return left
        left = [current for current in left if current not in may_end]


def error_of(current: SaveRound, ranks: Collection[Participant]) -> RoundAborted:
    """What the ranks of such a save are told: the steps that each rank saved last."""
    steps: dict[int, set[int]] = {}
    for who in ranks:
        if who.newest is not None:
            steps.setdefault(who.newest, set()).add(who.rank)
    told = ", ".join(f"step {step} by {_ranks(by)}" for step, by in sorted(steps.items())[:LISTED_MAX])
    return RoundAborted(
        f"step {current.key.step} lacks {_ranks(_missing(current))}, waiting for another save or closing; "
        f"last saved were {told}",
        hint="every rank must save the same steps; on a signal, let them agree on the step first",
    )


def _missing(current: SaveRound) -> set[int]:
    return set(range(current.world)) - current.sealed.keys() - current.leases.keys()


def _may_come(here: Collection[Participant], held: Collection[int]) -> bool:
    """Whether a rank may still bring its part: one that is not here may be on its way."""
    return not here or any(not who.closing and who.awaits not in held for who in here)


def _ranks(ranks: Collection[int]) -> str:
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:LISTED_MAX])) + (", …" if len(listed) > LISTED_MAX else "")
    return f"rank {text}" if len(listed) == 1 else f"ranks {text}"
