"""Whether a round waits in vain: for a node that is lost, or for ranks that are gone from all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast_formats.errors import RoundAborted
from holdfast_service.daemon.ports import Rendezvous
from holdfast_service.daemon.saving.joined_round import JoinedRound

DEAD_S = 20.0  # how long a node whose lease has ended, or that has started anew, may take to be back
ABSENT_S = 60.0  # how long ranks that are gone from all nodes are waited for
CREWS_EVERY_S = 5.0
NODES_EVERY_S = 5.0  # how often it is looked which nodes are gone

# Of a run's attempt: how many ranks are connected, by node, and which have ever been.
CrewsOf = Callable[[str, int], tuple[Mapping[str, int], set[int]]]


class AwaitedNodes:
    """Judges the rounds of this node; for one thread."""

    def __init__(self, rendezvous: Rendezvous, crews: CrewsOf, node: str) -> None:
        self._rendezvous, self._crews, self._node = rendezvous, crews, node

    def lost(self, joint: JoinedRound) -> RoundAborted | None:
        """Why a round ends that waits for a node which is gone, or which has come back without its part."""
        now = time.monotonic()
        if now < joint.nodes_at:
            return None
        joint.nodes_at = now + NODES_EVERY_S
        for one in self._rendezvous.look(joint.id).missing:
            if one.live or one.node == self._node:
                joint.dead_since.pop(one.node, None)
            elif now - joint.dead_since.setdefault(one.node, now) > DEAD_S:
                return RoundAborted(f"node {one.node} was lost while it wrote its share of the save")
        return None

    def absent(self, joint: JoinedRound) -> RoundAborted | None:
        """Why a round ends of which ranks are missing that were connected to a node and are to none any more. Those that
        never were may be on their way to their first save.
        """
        now, key = time.monotonic(), joint.current.key
        if now < joint.crews_at:
            return None
        joint.crews_at = now + CREWS_EVERY_S
        seen = self._rendezvous.look(joint.id)
        if seen.repeated:
            self._rendezvous.seal(joint.id)  # which ends it
            return None
        brought = {one.node: len(one.ranks) for one in seen.parts}
        crews, spoken = self._crews(key.run, key.attempt)
        coming = sum(max(count - brought.get(node, 0), 0) for node, count in crews.items())
        if coming >= len(seen.absent & spoken):
            joint.absent_since = None
        elif joint.absent_since is None:
            joint.absent_since = now
        elif now - joint.absent_since > ABSENT_S:
            gone = ", ".join(map(str, sorted(seen.absent & spoken)[:8]))
            return RoundAborted(f"ranks {gone} did not bring their part of step {key.step}, and are gone from all nodes")
        return None
