"""A share that a node cannot write: another node of the round writes it, from the slots of the first, once in a round.

The node says that it cannot only when nothing of it writes any more, and goes on to offer its slots until the round ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from holdfast_formats.staging.joint import RoundState, ShareHandover
from holdfast_service.daemon.ports import Rendezvous
from holdfast_service.daemon.saving.joined_round import JoinedRound

log = logging.getLogger(__name__)

_OF_A_MACHINE = frozenset({StorageFailed.code, NoSpace.code, CheckpointError.code, DaemonGone.code})

BeginHelp = Callable[[JoinedRound, str], Future[None]]  # begins to write the share of that node


class ShareHandovers:
    """For the thread that meets other nodes."""

    def __init__(self, rendezvous: Rendezvous, node: str, begin_help: BeginHelp) -> None:
        self._rendezvous, self._node, self._begin_help = rendezvous, node, begin_help

    def hand_over(self, joint: JoinedRound, seen: RoundState, error: BaseException) -> bool:
        """Whether another node may write what this one cannot: it has said so, now or before."""
        if seen.handover is not None:
            return seen.handover.node == self._node
        if not _is_of_storage(error):
            return False
        problem = on_node(error, self._node).problem()
        asked = self._rendezvous.hand_over(joint.id, problem)
        if asked:
            what = "%s@%s attempt %s: another node is asked to write the share of this one, which cannot: %s"
            log.warning(what, *joint.current.key, error)
        return asked

    def go_on(self, joint: JoinedRound, seen: RoundState) -> CheckpointError | None:
        """Take over what another node cannot write, or go on with it; why the round ends where this one cannot either."""
        handover = seen.handover
        if handover is None or handover.node == self._node or not joint.delivered:
            return None
        if joint.helping is None:
            if handover.helper in (None, self._node) and self._rendezvous.help(joint.id):
                log.info("%s@%s attempt %s: writing the share of node %s", *joint.current.key, handover.node)
                joint.helping = self._begin_help(joint, handover.node)
        elif not joint.helping.done():
            self._rendezvous.help(joint.id)  # again: it has not gone silent
        else:
            joint.helped = True
            error = joint.helping.exception()
            if error is not None:
                return failed(handover, f"{on_node(error, self._node).detail}, which was to write that share instead")
        return None

    def alone(self, joint: JoinedRound, error: BaseException) -> CheckpointError:
        """Why the round ends: this node cannot go on, and perhaps another one could not before."""
        named = on_node(error, self._node)
        handover = self._rendezvous.state(joint.id).handover
        if handover is None or handover.node == self._node:
            return named
        return from_problem({**named.problem(), "detail": f"{named.detail}; {failed(handover, '').detail}"})


def failed(handover: ShareHandover, why: str) -> CheckpointError:
    """The error of a node that cannot write its share, which none has written for it: that says `why`."""
    problem = handover.problem
    said = str(problem.get("detail", f"node {handover.node} cannot write"))
    helper = {} if handover.helper is None else {"helper": handover.helper}
    return from_problem({**problem, "detail": f"{said}; {why}" if why else said, **helper})


def on_node(error: BaseException, node: str) -> CheckpointError:
    """The error with the name of the node, where it is of a machine: others would look for its path on their own disks."""
    if not isinstance(error, CheckpointError):
        log.error("a save with other nodes failed", exc_info=error)
        return RoundAborted(f"unexpected {type(error).__name__} in the daemon of node {node}", hint="see the daemon's log")
    if "node" in error.members or error.code not in _OF_A_MACHINE:
        return error
    return from_problem({**error.problem(), "detail": f"on node {node}: {error.detail}", "node": node})


def _is_of_storage(error: BaseException) -> bool:
    """Whether a call to the disk has failed, which may be well on another node."""
    if isinstance(error, CatalogUnavailable) or not isinstance(error, (StorageFailed, NoSpace)):
        return False
    return "errno" in error.members
