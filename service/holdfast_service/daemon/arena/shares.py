"""Fair shares of common resources: arena memory, disk for staging, and places for ranks over HTTP.

A run may reserve a percentage of what others have not reserved. Alone it gets nearly everything, and the next run still
finds room; nothing is taken back from the first. The same rule applies to all runs of one other local user, so that many run
names do not help, and to all runs of the tokens for one pattern, which have a smaller percentage: a token alone leaves room
for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class OwnLimit(NamedTuple):
    """What a limit of a rank's process leaves for segments: of all ranks in this control group, or of this rank alone if
    `group` is "".
    """

    group: str
    bytes: int
    name: str


class ShareHolder(NamedTuple):
    """The holder of a share. `tenant` is "" for the daemon's own user and admins; `remote`: it has a token. `limits` are
    those of the process that touches the memory.
    """

    run: str
    tenant: str = ""
    limits: tuple[OwnLimit, ...] = ()
    remote: bool = False

    def is_in(self, group: str) -> bool:
        """Whether the memory it touches is charged to this control group."""
        return bool(group) and any(limit.group == group for limit in self.limits)


class Shares(NamedTuple):
    """The percentages: of a run, of a local user's runs, and of all runs of the tokens for one pattern."""

    run: int = 100
    tokens: int = 100

    def of_tenant(self, who: ShareHolder) -> int:
        return min(self.run, self.tokens) if who.remote else self.run


class StagingQuota(NamedTuple):
    """Bytes that the covered runs may hold on the disk, including staged data."""

    name: str
    bytes: int
    covers: Callable[[str], bool]


class ShareRequester(NamedTuple):
    """A connecting client: the tenant of its share, and whether `keep_last` takes effect without an admin."""

    tenant: str
    owner: bool


ADMIN = ShareRequester("", True)
NOBODY = ShareRequester("", False)


class Allowance(NamedTuple):
    """How much more may be reserved, and by which rule: the run's or its tenant's."""

    bytes_left: int
    name: str


def left(shares: Shares, total: int, held: Iterable[tuple[ShareHolder, int]], who: ShareHolder) -> Allowance:
    """How much more `who` may reserve of `total`, given what is held already."""
    taken = list(held)
    all_taken = sum(size for _, size in taken)
    bounds = [(f"the run {who.run!r}", shares.run, sum(size for holder, size in taken if holder.run == who.run))]
    if who.tenant:
        own = sum(size for holder, size in taken if holder.tenant == who.tenant)
        bounds.append((f"all runs of {who.tenant}", shares.of_tenant(who), own))
    allowed = []
    for what, percent, own in bounds:
        others = all_taken - own
        text = (
            f"of which {what} may reserve {percent} % of what others have not reserved: it has reserved {own}, "
            f"others {others}"
        )
        allowed.append(Allowance(max((total - others) * percent // 100 - own, 0), text))
    return min(allowed)
