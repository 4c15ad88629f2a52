"""Who may hold how much of what all runs share: memory of the arena, the disk behind it, and places for ranks over HTTP.

One rule: a run may hold so many percent of what the others do not hold. Alone it has nearly everything; whoever comes next
finds something; and a run that came first gives nothing back. What one token, made for some runs, or one other user of this
machine holds through all its runs is bounded in the same way, so that many names are no way around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ShareHolder(NamedTuple):
    """Whose something is. `tenant` stands for whoever may open some runs only: "" for the daemon's own user and admins."""

    run: str
    tenant: str = ""


class Asker(NamedTuple):
    """Who says hello: whose share it counts for, and whether what it asks to be kept is the owner's word or a mere wish."""

    tenant: str
    owner: bool


ADMIN = Asker("", True)
NOBODY = Asker("", False)


class Allowance(NamedTuple):
    """How much more somebody may have, and what says so: the run's bound, or its tenant's."""

    left: int
    name: str


def left(percent: int, total: int, held: Iterable[tuple[ShareHolder, int]], who: ShareHolder) -> Allowance:
    """What `who` may have beside what it has, of `total`, of which this is `held` by now."""
    taken = list(held)
    all_taken = sum(size for _, size in taken)
    bounds = [("run", who.run, sum(size for holder, size in taken if holder.run == who.run))]
    if who.tenant:
        bounds.append(("tenant", who.tenant, sum(size for holder, size in taken if holder.tenant == who.tenant)))
    shares = []
    for kind, name, own in bounds:
        others = all_taken - own
        what = f"the run {name!r}" if kind == "run" else f"all runs of {name}"
        text = f"of which {what} may hold {percent} % of what others do not: {own} are its own, {others} theirs"
        shares.append(Allowance(max((total - others) * percent // 100 - own, 0), text))
    return min(shares)
