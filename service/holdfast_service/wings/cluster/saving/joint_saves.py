"""Saves whose ranks are on several nodes: this node delivers its part, writes its share, and commits if it first sees all
shares written.

One thread coordinates with other nodes in the catalog, for all open rounds; another writes, one share after the other. So a
node that writes one round still follows the others. While the catalog is unavailable, sealed slots wait; training does not.

A share is written once the launch's earlier rounds have ended: until then its round may be dropped for a newer save, as on
one node. If two rounds were written at a time, all slots would be busy, and one node would drop the newest save, while
another one, which has not heard yet that both are sealed, drops the second for it; then both would be lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    RoundAborted,
    from_problem,
)
from holdfast_formats.staging import part
from holdfast_formats.staging.joint import JointlyStaged, JointRound, RoundState, ShareHandover
from holdfast_formats.staging.plan import decode_receipt
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.other_nodes import Host, Result
from holdfast_service.daemon.saving.rounds import RoundKey, SaveRound
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.rendezvous import Rendezvous
from holdfast_service.wings.cluster.saving.awaited_nodes import AwaitedNodes, NodeRanksOf, ShareHandovers, on_node
from holdfast_service.wings.cluster.saving.joined_round import POLL_S, JoinedRound
from holdfast_service.wings.cluster.saving.joint_writing import ShareWriter, ShareWritten

log = logging.getLogger(__name__)

AWAY_S = 0.5  # between two tries, while the catalog is away
CLOSE_S = 30.0  # how long the end of a daemon waits for the other nodes of a round


class JointParty(NamedTuple):
    """A daemon's access to joint saves. `node_ranks` returns an attempt's connected ranks by node, and all that were."""

    rendezvous: Rendezvous
    exchange: ExchangeServer
    node_ranks: NodeRanksOf


class JointSaves:
    """The thread that coordinates with other nodes. Thread-safe."""

    def __init__(
        self, party: JointParty, control: Control, node: str, writer: ShareWriter, *, host: Host, history: SaveHistory
    ) -> None:
        self._party, self._control, self._node, self._writer = party, control, node, writer
        self._host, self._history = host, history
        self._awaited = AwaitedNodes(party.rendezvous, party.node_ranks, node)
        self._handovers = ShareHandovers(party.rendezvous, node, self._help)
        self._joints: dict[RoundKey, JoinedRound] = {}
        self._refusals: list[tuple[RoundKey, int, CheckpointError]] = []
        self._published: list[int] = []
        self._wake = threading.Event()
        self._changed = False
        self._closing: float | None = None
        self._pool = ThreadPoolExecutor(1, "holdfast-share")
        self._thread = threading.Thread(target=self._run, name="holdfast-joint", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """A rank has sealed, or a round was given up."""
        self._wake.set()

    def look_at_all(self) -> None:
        """A round has changed, on any node."""
        self._changed = True
        self._wake.set()

    def refuse(self, key: RoundKey, world: int, error: CheckpointError) -> None:
        """Give up this node's part of a round, which ends it on all nodes."""
        self._refusals.append((key, world, on_node(error, self._node)))
        self._wake.set()

    @property
    def busy(self) -> bool:
        return bool(self._joints or self._refusals or self._published)

    def close(self) -> None:
        """Wait a limited time for sealed rounds; then stop."""
        self._closing = time.monotonic() + CLOSE_S
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._tell()
                self._meet()
                pause = self._pause()
            except CatalogUnavailable as away:
                log.info("cannot reach other nodes: %s", away.detail)
                self._host.wait_on()
                pause = AWAY_S
            except Exception:
                log.exception("saves across nodes failed")
                pause = AWAY_S
            self._wake.wait(pause)
            self._wake.clear()
        for joint in list(self._joints.values()):
            if joint.seen is not None and joint.ended is None:
                self._leave(joint)
        self._pool.shutdown()
        for joint in list(self._joints.values()):
            self._finish(joint)

    def _leave(self, joint: JoinedRound) -> None:
        """The daemon ends. Staged files stay: other nodes may still commit them, if this node's share is complete."""
        error = _stopped(self._node)
        try:
            if not (joint.delivered or joint.written):
                self._party.rendezvous.abort(joint.id, error.problem())
        except CheckpointError as away:
            log.warning("cannot tell other nodes that this one is stopping: %s", away.detail)
        self._end(joint, error, left=True)

    def _is_over(self) -> bool:
        if self._closing is None:
            return False
        going = self._refusals or self._published or any(joint.seen is not None for joint in self._joints.values())
        return time.monotonic() > self._closing or not going

    def _pause(self) -> float:
        return max(min((joint.look_at - time.monotonic() for joint in self._joints.values()), default=POLL_S[1]), 0.01)

    def _tell(self) -> None:
        """Send pending reports to other nodes."""
        while self._refusals:
            key, world, error = self._refusals[0]
            self._party.rendezvous.refuse(*key, world, error.problem())
            self._refusals.pop(0)
        while self._published:
            self._party.rendezvous.committed(self._published[0])
            self._published.pop(0)

    def _meet(self) -> None:
        ready = {current.key: current for current in self._host.ready()}
        for key, joint in list(self._joints.items()):
            if joint.writing is None and not self._host.may_give_way(joint.current):
                del self._joints[key]  # given up here, or all its ranks have come to this node
                self._party.rendezvous.abort(joint.id, RoundAborted(f"node {self._node} does not take part").problem())
        for key, current in sorted(ready.items(), key=lambda item: item[0].step):
            ranks = tuple(sorted(current.sealed))
            if key not in self._joints or self._joints[key].ranks != ranks:
                self._arrive(current, ranks)
        changed, self._changed = self._changed, False
        for joint in _in_order(self._joints.values()):
            if joint.ended is not None:
                self._finish(joint)
            elif changed or time.monotonic() >= joint.look_at or joint.news or joint.waits:
                self._go_on_or_end(joint)

    def _arrive(self, current: SaveRound, ranks: tuple[int, ...]) -> None:
        sealed = dict(current.sealed)
        if tuple(sorted(sealed)) != ranks:
            return  # it was given up at this moment
        declaration, tables = part.encode(one.table for one in sealed.values())
        joint = self._joints.get(current.key)
        try:
            number = self._party.rendezvous.arrive(*current.key, current.world, ranks, declaration, tables)
        except CatalogUnavailable:
            raise
        except CheckpointError as error:
            if joint is not None and joint.writing is not None:
                self._end(joint, error)
                return
            self._joints.pop(current.key, None)
            self._host.given_up(current, error)
            return
        if joint is None or (joint.id != number and joint.writing is None):
            self._joints[current.key] = joint = JoinedRound(current, number, ranks)
        elif joint.id != number:  # the one that is being written has just ended: this one is not needed
            self._party.rendezvous.abort(number, RoundAborted(f"node {self._node} does not take part").problem())
        joint.bring(ranks)

    def _go_on_or_end(self, joint: JoinedRound) -> None:
        """Advance a round; its errors do not stop other rounds."""
        try:
            self._go_on(joint)
        except CatalogUnavailable:
            raise
        except Exception as failure:
            self._give_up(joint, failure)

    def _give_up(self, joint: JoinedRound, failure: Exception) -> None:
        """End the round for all nodes, with this node's name in the error, unless a node is committing it: then look again
        later.
        """
        error = on_node(failure, self._node)
        rendezvous = self._party.rendezvous
        if not rendezvous.abort(joint.id, error.problem(), claimed=True) and not rendezvous.has_lost(joint.id):
            joint.postpone()
        elif joint.writing is not None:
            self._end(joint, error)
        else:
            self._joints.pop(joint.current.key, None)
            self._host.given_up(joint.current, error)

    def _go_on(self, joint: JoinedRound) -> None:
        if joint.ask():  # of those that come last, one commits at once
            self._claim(joint)
            return
        seen = self._party.rendezvous.state(joint.id)
        if seen.state == "open" and seen.brought >= seen.world:
            self._party.rendezvous.seal(joint.id)
            seen = self._party.rendezvous.state(joint.id)
        joint.observe(seen)
        if seen.state == "open":
            self._wait_for_others(joint)
            return
        if joint.writing is None:
            if seen.state == "aborted":
                del self._joints[joint.current.key]
                self._host.given_up(joint.current, from_problem(seen.problem or {}))
                self._party.rendezvous.receive_part(joint.id)
            elif seen.state in ("sealed", "committing"):
                self._begin(joint, seen)
            elif self._host.sealed(joint.current) or joint.seen is not None:
                self._end(joint, None)
            else:
                del self._joints[joint.current.key]
            return
        self._follow(joint, seen)

    def _begin(self, joint: JoinedRound, state: RoundState) -> None:
        """All parts are there. Once this node writes its share, it no longer gives the round up alone."""
        if joint.seen is None:
            joint.seal(self._party.rendezvous.sealed(joint.id))
            if not self._host.sealed(joint.current):
                del self._joints[joint.current.key]
                return
        if self._is_behind(joint) or not self._host.writes(joint.current):
            return  # it is, or was, dropped for a newer one while it waits
        self._party.exchange.offer(joint.id, joint.slots)
        assert joint.seen is not None
        writing = self._pool.submit(self._writer.write, joint.seen, state, joint.slots, joint.finished.is_set)
        joint.begin_writing(writing)
        writing.add_done_callback(lambda done: self._wake.set())

    def _is_behind(self, joint: JoinedRound) -> bool:
        """Whether an earlier round of its launch is written first, as on all nodes: two that write in different orders wait
        for each other's bytes. Nodes bring parts in the order of steps: if an earlier round was open at the last look, it is
        complete by now.
        """
        earlier = _in_order(other for other in self._joints.values() if joint.is_after(other))
        for other in earlier:
            if other.seen is None:
                self._go_on_or_end(other)
        return any(other.writing is not None and other.ended is None for other in earlier)

    def _help(self, joint: JoinedRound, node: str) -> Future[None]:
        assert joint.seen is not None
        future = self._pool.submit(self._writer.write_for, joint.seen, node, joint.slots, joint.finished.is_set)
        future.add_done_callback(lambda done: self._wake.set())
        return future

    def _follow(self, joint: JoinedRound, seen: RoundState) -> None:
        assert joint.writing is not None
        error = joint.writing.exception() if joint.writing.done() else None
        if seen.state in ("aborted", "committed"):
            self._end(joint, None if seen.state == "committed" else from_problem(seen.problem or {}))
            if seen.state == "aborted":
                self._party.rendezvous.receive_part(joint.id)
        elif error is not None and not self._handovers.hand_over(joint, seen, error):
            self._abort(joint, self._handovers.alone(joint, error))
        elif not seen.written:
            lost = self._handovers.go_on(joint, seen) or self._awaited.lost(joint)
            if lost is not None:
                self._abort(joint, lost)
        elif joint.delivered:
            self._claim(joint)
        elif error is not None:
            lost = self._awaited.deserted(joint)
            if lost is not None:
                self._abort(joint, lost)

    def _claim(self, joint: JoinedRound) -> None:
        """Commit the round if all shares are written, and no other node commits it."""
        assert joint.writing is not None and joint.seen is not None
        if self._party.rendezvous.claim(joint.id):
            self._commit(joint, joint.writing.result(), joint.seen)

    def _commit(self, joint: JoinedRound, written: ShareWritten, seen: JointRound) -> None:
        current = joint.current
        receipts = [decode_receipt(one) for one in self._party.rendezvous.receipts(joint.id)]
        handover = self._party.rendezvous.state(joint.id).handover
        staged = JointlyStaged(joint.place, receipts, seen.created)
        try:
            measured = self._history.ending(current, **written.measured)
            committed = self._control.saves.commit(current.id, written.plan, measured, staged)
            if handover is not None:
                self._control.saves.written_for(committed, handover)
        except CatalogUnavailable:  # the claim is still this node's when it is back
            raise
        except Exception as error:
            self._abort(joint, error, claimed=True)
            return
        self._published.append(joint.id)
        self._end(joint, committed, handover=handover)
        log.info("%s@%s attempt %s committed with %d nodes: %d bytes", *current.key, len(seen.parts), committed.bytes)
        self._tell()

    def _abort(self, joint: JoinedRound, error: BaseException, claimed: bool = False) -> None:
        """End the round for all nodes, because this one cannot continue, unless it has just been committed."""
        error = on_node(error, self._node)
        if self._party.rendezvous.abort(joint.id, error.problem(), claimed):
            self._end(joint, error)

    def _end(self, joint: JoinedRound, result: Result, left: bool = False, handover: ShareHandover | None = None) -> None:
        """The round has ended, or is `left` to others. Free its slots once nothing is written from them any more."""
        joint.end(result, left, handover)
        self._party.exchange.withdraw(joint.id)
        self._finish(joint)

    def _finish(self, joint: JoinedRound) -> None:
        if joint.ended is None or joint.at_work:
            return
        del self._joints[joint.current.key]
        if joint.ended.result is None:
            measured = self._history.ending(joint.current, **joint.measured)
            try:
                self._control.saves.joined(joint.current.id, *joint.current.key, measured)
            except Exception:  # the checkpoint exists: ranks get the outcome even if the rest cannot be recorded
                log.exception("cannot record the result of the save of %s@%s attempt %s", *joint.current.key)
        written: Sequence[WrittenSpan] = ()
        if isinstance(joint.ended.result, Manifest) and joint.writing is not None and joint.seen is not None:
            written = joint.writing.result().spans(joint.writers)
        self._host.ended(joint.current, joint.ended.result, joint.ended.staged, written)

    def _wait_for_others(self, joint: JoinedRound) -> None:
        error = self._awaited.absent(joint)
        if error is not None and self._party.rendezvous.abort(joint.id, error.problem()):
            del self._joints[joint.current.key]
            self._host.given_up(joint.current, error)


def _in_order(joints: Iterable[JoinedRound]) -> list[JoinedRound]:
    """Sorted by their steps."""
    return sorted(joints, key=lambda one: one.current.key.step)


def _stopped(node: str) -> RoundAborted:
    return RoundAborted(
        f"the daemon of node {node} stopped before all nodes had finished the save",
        hint="the next launch restores it if it was committed",
    )
