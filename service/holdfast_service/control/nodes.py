"""The nodes whose daemons serve a root, as one of them sees the others.

A daemon that serves its root alone has `OneNode`: it has every duty, and no lock to wait for. Where daemons of several nodes
share a root, `wings/cluster` has the other implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.lineage import Lineage
from holdfast_formats.rest.bodies import NodeState
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.database.cluster_schema import DUTY_CHARS_MAX
from holdfast_service.storage import Records

UPKEEP = "upkeep"  # the maintenance of the root
THINNING = "thinning"  # takes optimizer and masters out of old checkpoints
REPLICA = "replica "  # what the names of such duties begin with
LEASE_S = 30.0  # of a membership, unless it is renewed
RETURNED_S = 900.0  # a node that was lost and is back is shown as such for so long
LEFT, CAME_BACK = "left", "came_back"  # what a node's `about` says of its membership itself


class ClusterNode(NamedTuple):
    """A node as the others see it. `lease_s` are the seconds for which it counts as live; negative when it is gone."""

    name: str
    boot: str
    lease_s: float
    since: datetime
    age_s: float  # of this membership
    about: Mapping[str, Any]
    duties: tuple[str, ...]

    @property
    def live(self) -> bool:
        return self.lease_s > 0

    @property
    def state(self) -> NodeState:
        """`stopped`: it has left. `lost`: its lease has ended without that. `returned`: live, and it, or the daemon of its
        name before it, was lost lately.
        """
        if not self.live:
            return "stopped" if self.about.get(LEFT) else "lost"
        return "returned" if self.about.get(CAME_BACK) and self.age_s < RETURNED_S else "live"

    @property
    def heard_s(self) -> float:
        """Seconds since its last sign of life."""
        return max(-self.lease_s if self.state == "stopped" else LEASE_S - self.lease_s, 0.0)


class Census(NamedTuple):
    """How many nodes are in each state, and the names of those that are lost."""

    states: Mapping[NodeState, int]
    lost: tuple[str, ...]


class SharedReaders(Protocol):
    """Readers of checkpoints at other nodes."""

    def announce(self, run: str, step: int, opened: bool) -> None:
        """A reader begins here. `opened`: it reads files that it has open, so it blocks removal, not replacement."""

    def elsewhere(self, run: str, opened: bool = True) -> Mapping[int, float]:
        """The steps of a run that are being read at other nodes, with seconds that remain; without `opened`, not those with
        readers of open files only.
        """


class Nodes(Protocol):
    """What control and the HTTP edge ask of all nodes."""

    @property
    def alone(self) -> bool:
        """Whether no other daemon can serve the root."""

    @property
    def node(self) -> str:
        """This node's name where several serve the root, else nothing."""

    @property
    def boot(self) -> str | None:
        """What distinguishes this daemon from earlier ones of its name, for the other nodes."""

    @property
    def names_s(self) -> float:
        """For how long this node may not see a name that another one has made."""

    @property
    def holds(self) -> SharedReaders: ...

    def attempts(self, records: Records) -> Attempts: ...

    def join(self, wait_s: float | None = None) -> None:
        """Become a member, unless it is one. `RootBusy` if another daemon of this name still is one after `wait_s`."""

    def has(self, duty: str) -> bool:
        """Whether this node does this work for all; takes the duty if it is free."""

    def locked(
        self, name: str, shared: bool = False, *, insists: bool = False, asks: bool = True
    ) -> AbstractContextManager[Callable[[], None]]:
        """A lock that at most one node has. Call what it yields before acts that need it: it raises once the lock is lost.

        `insists`: a node that has it for too long loses it. `asks=False`: the caller never asks, and no node takes its lock.
        """

    def changed(self) -> None:
        """Something that the other nodes are to know has changed."""

    def parted(self, run: str) -> None:
        """The run has no connected rank here any more."""

    def settle(self, round_id: int, lineage: Lineage) -> Lineage:
        """The lineage of a checkpoint of several nodes: that of the first one that commits it."""

    def connected(self) -> set[str]:
        """Runs with ranks connected to a member node."""

    def members(self) -> Sequence[ClusterNode]:
        """All nodes of which something is known, by name; none for a daemon alone."""

    def census(self) -> Census: ...

    def by_node(self) -> Mapping[str, Mapping[str, int]]:
        """The number of connected ranks of the visible runs, by node and run."""

    def beaten_s(self) -> float | None:
        """Seconds since this node's membership was last renewed."""

    def forget(self, name: str) -> None:
        """List a node that is gone no more."""

    def rotate_secret(self) -> None:
        """Create a new secret for the nodes."""

    def close(self) -> None: ...


class OneNode:
    """A daemon that serves its root alone."""

    alone, node, names_s = True, "", 0.0
    boot: str | None = None

    @property
    def holds(self) -> SharedReaders:
        return self

    def announce(self, run: str, step: int, opened: bool) -> None: ...

    def elsewhere(self, run: str, opened: bool = True) -> Mapping[int, float]:
        return {}

    def attempts(self, records: Records) -> Attempts:
        return Attempts(records)

    def join(self, wait_s: float | None = None) -> None: ...

    def has(self, duty: str) -> bool:
        return True

    def locked(
        self, name: str, shared: bool = False, *, insists: bool = False, asks: bool = True
    ) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(self.changed)

    def changed(self) -> None: ...

    def parted(self, run: str) -> None: ...

    def settle(self, round_id: int, lineage: Lineage) -> Lineage:
        return lineage

    def connected(self) -> set[str]:
        return set()

    def members(self) -> Sequence[ClusterNode]:
        return ()

    def census(self) -> Census:
        return Census({"live": 1}, ())

    def by_node(self) -> Mapping[str, Mapping[str, int]]:
        return {}

    def beaten_s(self) -> float | None:
        return None

    def forget(self, name: str) -> None:
        raise NoSuchResource(f"there is no other node {name!r}", hint="this catalog is used by a single daemon")

    def rotate_secret(self) -> None:
        raise NoSuchResource("there is no secret to rotate", hint="this catalog is used by a single daemon")

    def close(self) -> None: ...


ONE_NODE = OneNode()


def deciding(run: str) -> str:
    """The name of the lock under which a run's checkpoints are removed, replaced, pinned and labelled."""
    return f"deciding {run}"


def changing(run: str) -> str:
    """The name of the lock under which a run's file is read and replaced."""
    return f"run file {run}"


def repairing(run: str, step: int) -> str:
    """The name of the lock under which a checkpoint is repaired."""
    return f"repairing {run}@{step}"


def replica_duty(name: str) -> str:
    """The name of the duty to copy to a replica: one node does, also where several are configured with it."""
    return f"{REPLICA}{name}"[:DUTY_CHARS_MAX]
