"""Whether a round waits in vain: for a node that is lost, or for ranks that are gone from all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast_formats.errors import CheckpointError, RoundAborted
from holdfast_formats.staging.joint import JointRound
from holdfast_service.daemon.ports import Rendezvous
from holdfast_service.daemon.saving.joined_round import JoinedRound
from holdfast_service.daemon.saving.share_handovers import failed

DEAD_S = 20.0  # how long a node whose lease has ended, or that has started anew, may take to be back
ABSENT_S = 60.0  # how long ranks that are gone from all nodes are waited for
CREWS_EVERY_S = 5.0
NODES_EVERY_S = 5.0  # how often it is looked which nodes are gone

_HELPERS, _OTHERS = "~helpers", "~others"  # no names of nodes

# Of a run's attempt: how many ranks are connected, by node, and which have ever been.
CrewsOf = Callable[[str, int], tuple[Mapping[str, int], set[int]]]


class AwaitedNodes:
    """Judges the rounds of this node; for one thread."""

    def __init__(self, rendezvous: Rendezvous, crews: CrewsOf, node: str) -> None:
        self._rendezvous, self._crews, self._node = rendezvous, crews, node

    def lost(self, joint: JoinedRound) -> CheckpointError | None:
        """Why a round ends that waits for a node which is gone, or which has come back without its part; or for one that is
        silent, and was to write the share of another.
        """
        seen = self._seen(joint)
        if seen is None:
            return None
        handover = seen.handover
        for one in seen.missing:
            if self._are_gone(joint, one.node, not one.live and one.node != self._node):
                if handover is not None and handover.node == one.node:
                    return failed(handover, "it was lost before another node had written its share of the save")
                return RoundAborted(f"node {one.node} was lost while it wrote its share of the save")
        if handover is None:
            return None
        at_work = any(one.live and one.node != handover.node for one in seen.missing)  # who may help when that is done
        if self._are_gone(joint, _HELPERS, handover.overdue and (handover.helper is not None or not at_work)):
            whom = "no other node has begun" if handover.helper is None else f"node {handover.helper} has not gone on"
            return failed(handover, f"{whom} to write its share of the save")
        return None

    def deserted(self, joint: JoinedRound) -> CheckpointError | None:
        """Why a round ends that this node cannot commit, since it has not written, and the others are gone that could."""
        seen = self._seen(joint)
        if seen is not None and self._are_gone(
            joint, _OTHERS, not any(one.live for one in seen.parts if one.node != self._node)
        ):
            return RoundAborted("the other nodes of the save were lost before one of them had committed it")
        return None

    def _seen(self, joint: JoinedRound) -> JointRound | None:
        """The round, if it is time to look at it."""
        now = time.monotonic()
        if now < joint.nodes_at:
            return None
        joint.nodes_at = now + NODES_EVERY_S
        return self._rendezvous.look(joint.id)

    def _are_gone(self, joint: JoinedRound, which: str, now_gone: bool) -> bool:
        """Whether they have been for so long that they are not waited for."""
        if not now_gone:
            joint.dead_since.pop(which, None)
            return False
        now = time.monotonic()
        return now - joint.dead_since.setdefault(which, now) > DEAD_S

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
