"""Fair shares of what all runs use: arena memory, disk for staging, and places for ranks over HTTP.

A run may reserve a percentage of what others have not reserved. Alone it gets nearly everything, and the next run
still finds room; nothing is taken back from the first. The same rule applies to all runs of one token with a run
pattern, and of one other local user, so that many run names do not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class OwnLimit(NamedTuple):
    """What a limit of a rank's own process leaves for segments: of all ranks in this control group, or of this rank alone
    where `group` is "".
    """

    group: str
    bytes: int
    name: str


class ShareHolder(NamedTuple):
    """Whose share something counts for. `tenant` is "" for the daemon's own user and admins. `limits` are those of the
    process that touches the memory.
    """

    run: str
    tenant: str = ""
    limits: tuple[OwnLimit, ...] = ()

    def is_in(self, group: str) -> bool:
        """Whether what it touches is charged to this control group."""
        return bool(group) and any(limit.group == group for limit in self.limits)


class Asker(NamedTuple):
    """Who connects: whose share counts, and whether `keep_last` takes effect without an admin."""

    tenant: str
    owner: bool


ADMIN = Asker("", True)
NOBODY = Asker("", False)


class Allowance(NamedTuple):
    """How much more may be reserved, and by which rule: the run's or its tenant's."""

    left: int
    name: str


def left(percent: int, total: int, held: Iterable[tuple[ShareHolder, int]], who: ShareHolder) -> Allowance:
    """How much more `who` may reserve of `total`, of which `held` is reserved already."""
    taken = list(held)
    all_taken = sum(size for _, size in taken)
    bounds = [("run", who.run, sum(size for holder, size in taken if holder.run == who.run))]
    if who.tenant:
        bounds.append(("tenant", who.tenant, sum(size for holder, size in taken if holder.tenant == who.tenant)))
    shares = []
    for kind, name, own in bounds:
        others = all_taken - own
        what = f"the run {name!r}" if kind == "run" else f"all runs of {name}"
        text = (
            f"of which {what} may reserve {percent} % of what others have not reserved: it has reserved {own}, "
            f"others {others}"
        )
        shares.append(Allowance(max((total - others) * percent // 100 - own, 0), text))
    return min(shares)
