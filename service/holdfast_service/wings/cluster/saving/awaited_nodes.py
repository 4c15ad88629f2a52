"""Ends rounds that wait in vain for a lost node, or for ranks that left all nodes; hands over shares that a node cannot
write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    DaemonGone,
    NoSpace,
    RoundAborted,
    StorageFailed,
    from_problem,
)
from holdfast_formats.staging.joint import JointRound, RoundState, ShareHandover
from holdfast_service.wings.cluster.rendezvous import Rendezvous
from holdfast_service.wings.cluster.saving.joined_round import JoinedRound

log = logging.getLogger(__name__)

DEAD_S = 20.0  # how long a node whose lease has ended, or that has started again, may take to be back
ABSENT_S = 60.0  # how long ranks that are gone from all nodes are waited for
NODE_RANKS_EVERY_S = 5.0
NODES_EVERY_S = 5.0  # how often it is looked which nodes are gone

_HELPERS, _OTHERS, _RANKS = "~helpers", "~others", "~ranks"  # no names of nodes

# Of a run's attempt: how many ranks are connected, by node, and which have ever been.
NodeRanksOf = Callable[[str, int], tuple[Mapping[str, int], set[int]]]
_OF_A_MACHINE = frozenset({StorageFailed.code, NoSpace.code, CheckpointError.code, DaemonGone.code})

BeginHelp = Callable[[JoinedRound, str], Future[None]]  # begins to write the share of that node


class AwaitedNodes:
    """Checks the rounds of this node; for one thread."""

    def __init__(self, rendezvous: Rendezvous, node_ranks: NodeRanksOf, node: str) -> None:
        self._rendezvous, self._node_ranks, self._node = rendezvous, node_ranks, node

    def lost(self, joint: JoinedRound) -> CheckpointError | None:
        """The error of a round that waits for a node that is gone, or that returned without its part; or for a silent helper
        of another node's share.
        """
        seen = self._seen(joint)
        if seen is None:
            return None
        handover = seen.handover
        for one in seen.missing:
            if joint.is_gone(one.node, not one.live and one.node != self._node, DEAD_S):
                if handover is not None and handover.node == one.node:
                    return failed(handover, "it was lost, and no other node has written its share of the save yet")
                return RoundAborted(f"node {one.node} was lost while it wrote its share of the save")
        if handover is None:
            return None
        at_work = any(one.live and one.node != handover.node for one in seen.missing)  # candidates for helping
        if joint.is_gone(_HELPERS, handover.overdue and (handover.helper is not None or not at_work), DEAD_S):
            silent = (
                "no other node has started"
                if handover.helper is None
                else f"node {handover.helper} has stopped making progress"
            )
            return failed(handover, f"{silent} to write its share of the save")
        return None

    def deserted(self, joint: JoinedRound) -> CheckpointError | None:
        """The error of a round that this node cannot commit, because it has not written, and the nodes that could
        are gone.
        """
        seen = self._seen(joint)
        if seen is None:
            return None
        others_live = any(one.live for one in seen.parts if one.node != self._node)
        if joint.is_gone(_OTHERS, not others_live, DEAD_S):
            return RoundAborted("all other nodes of the save were lost before it was committed")
        return None

    def _seen(self, joint: JoinedRound) -> JointRound | None:
        """The round, if it is due for a look."""
        return self._rendezvous.rounds(joint.id) if joint.is_due(_OTHERS, NODES_EVERY_S) else None

    def absent(self, joint: JoinedRound) -> RoundAborted | None:
        """The error of a round whose missing ranks were connected to a node and are to none any more. Ranks that never
        connected may still come.
        """
        if not joint.is_due(_RANKS, NODE_RANKS_EVERY_S):
            return None
        key = joint.current.key
        seen = self._rendezvous.rounds(joint.id)
        if seen.repeated:
            self._rendezvous.seal(joint.id)  # which ends it
            return None
        brought = {one.node: len(one.ranks) for one in seen.parts}
        node_ranks, spoken = self._node_ranks(key.run, key.attempt)
        coming = sum(max(count - brought.get(node, 0), 0) for node, count in node_ranks.items())
        if joint.is_gone(_RANKS, coming < len(seen.absent & spoken), ABSENT_S):
            gone = ", ".join(map(str, sorted(seen.absent & spoken)[:8]))
            return RoundAborted(
                f"ranks {gone} did not contribute to step {key.step} and are no longer connected to any node"
            )
        return None


class ShareHandovers:
    """Shares that a node cannot write: another node writes them, from the slots of the first, once in a round. For the
    thread that talks to other nodes.

    A node offers its share only when it writes nothing of it any more, and serves its slots until the round ends.
    """

    def __init__(self, rendezvous: Rendezvous, node: str, begin_help: BeginHelp) -> None:
        self._rendezvous, self._node, self._begin_help = rendezvous, node, begin_help

    def hand_over(self, joint: JoinedRound, seen: RoundState, error: BaseException) -> bool:
        """Offer this node's share to another node; False if that is impossible."""
        if seen.handover is not None:
            return seen.handover.node == self._node
        if not _is_of_storage(error):
            return False
        problem = on_node(error, self._node).problem()
        asked = self._rendezvous.hand_over(joint.id, problem)
        if asked:
            what = "%s@%s attempt %s: this node cannot write its share and asks another node to: %s"
            log.warning(what, *joint.current.key, error)
        return asked

    def go_on(self, joint: JoinedRound, seen: RoundState) -> CheckpointError | None:
        """Take over another node's share, or continue it; returns an error if this node cannot write it either."""
        handover = seen.handover
        if handover is None or handover.node == self._node or not joint.delivered:
            return None
        if joint.helping is None:
            if handover.helper in (None, self._node) and self._rendezvous.help(joint.id):
                log.info("%s@%s attempt %s: writing the share of node %s", *joint.current.key, handover.node)
                joint.begin_helping(self._begin_help(joint, handover.node))
        elif not joint.helping.done():
            self._rendezvous.help(joint.id)  # again: it has not gone silent
        else:
            error = joint.end_helping()
            if error is not None:
                return failed(handover, f"{on_node(error, self._node).detail}, while it wrote that share instead")
        return None

    def alone(self, joint: JoinedRound, error: BaseException) -> CheckpointError:
        """The error if this node cannot continue, and perhaps another one could not before."""
        named = on_node(error, self._node)
        handover = self._rendezvous.state(joint.id).handover
        if handover is None or handover.node == self._node:
            return named
        return from_problem({**named.problem(), "detail": f"{named.detail}; {failed(handover, '').detail}"})


def failed(handover: ShareHandover, why: str) -> CheckpointError:
    """The error of a node that cannot write its share, which no other node has written because of `why`."""
    problem = handover.problem
    detail = str(problem.get("detail", f"node {handover.node} cannot write"))
    helper = {} if handover.helper is None else {"helper": handover.helper}
    return from_problem({**problem, "detail": f"{detail}; {why}" if why else detail, **helper})


def on_node(error: BaseException, node: str) -> CheckpointError:
    """Add the node's name to an error of its machine: its paths are on that machine's disks."""
    if not isinstance(error, CheckpointError):
        log.error("a save across nodes failed", exc_info=error)
        return RoundAborted(f"unexpected {type(error).__name__} in the daemon of node {node}", hint="see the daemon's log")
    if "node" in error.members or error.code not in _OF_A_MACHINE:
        return error
    return from_problem({**error.problem(), "detail": f"on node {node}: {error.detail}", "node": node})


def _is_of_storage(error: BaseException) -> bool:
    """Whether a disk operation failed, which may succeed on another node."""
    if isinstance(error, CatalogUnavailable) or not isinstance(error, (StorageFailed, NoSpace)):
        return False
    return "errno" in error.members
