"""This node's share of a save whose ranks are on several nodes: planned identically on every node, and written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from holdfast_formats.errors import CatalogUnavailable, from_problem
from holdfast_formats.naming import Place
from holdfast_formats.staging import declaration, part
from holdfast_formats.staging.blocks import SharePlan
from holdfast_formats.staging.declaration import Declaration
from holdfast_formats.staging.joint import JointRound, RoundState
from holdfast_formats.staging.plan import WritePlan, encode_receipt
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.writing.fsync_timer import FsyncTimed
from holdfast_service.daemon.writing.write_threads import Schedule
from holdfast_service.wings.cluster.exchange.fetching import Peer
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.rendezvous import Rendezvous
from holdfast_service.wings.cluster.saving import share_planner
from holdfast_service.wings.cluster.saving.part_writer import NodeShare, SlotSources, write_share

log = logging.getLogger(__name__)

DECODED_KEPT = 64
AWAY_S = 0.5  # between two tries, while the catalog is away
PEERS_AT_ONCE = 4
LOOK_AGAIN_S = 0.5  # interval of looking up another node's address while it does not send
PEER_PATIENCE_S = 60.0  # how long a node that does not send is retried


_Found = TypeVar("_Found")


class ShareWritten(NamedTuple):
    """The plan and the measurements of a written share."""

    planned: SharePlan
    measured: dict[str, float]

    @property
    def plan(self) -> WritePlan:
        return self.planned.plan

    def spans(self, nodes: Sequence[str]) -> list[WrittenSpan]:
        """The parts that these nodes, in the order of their numbers, have written."""
        columns = (*self.planned.grid[:3], self.planned.owners)
        return [
            WrittenSpan(self.plan.files[file].layout.name, begin, end, nodes[owner])
            for file, begin, end, owner in zip(*(column.tolist() for column in columns), strict=True)
        ]


class _Written(NamedTuple):
    """A durable share, and what was measured, in seconds."""

    place: Place
    receipt: bytes
    measured: dict[str, float]


class ShareWriter:
    """Writes shares, one after the other; for one thread."""

    def __init__(
        self,
        control: Control,
        node: str,
        rendezvous: Rendezvous,
        exchange: ExchangeServer,
        history: SaveHistory,
    ) -> None:
        self._control, self._node = control, node
        self._rendezvous, self._exchange, self._history = rendezvous, exchange, history
        self._declarations: dict[str, Declaration] = {}

    def write(
        self, seen: JointRound, state: RoundState, slots: Mapping[int, memoryview], is_over: Callable[[], bool]
    ) -> ShareWritten:
        """Write this node's share of a sealed round, and report it; `state` is the previous one. `is_over` returns whether
        the round has ended.
        """
        began = time.monotonic()
        if state.handover is not None and state.handover.node == self._node:  # it was handed over before this daemon started
            raise from_problem(state.handover.problem)
        share = self._planned(seen, self._node, is_over)
        if state.delivered:  # before this daemon was started: it may be published by now (I4)
            return ShareWritten(share, {})
        if seen.parts[0].node == self._node:
            self._control.admission.admit(share.plan)  # equal on all nodes: a refusal ends the round for all
        planned = time.monotonic()
        written = self._write(seen, self._node, share, slots, is_over)
        self._patiently(lambda: self._rendezvous.deliver(seen.id, written.receipt), is_over)
        log.info("%s@%s attempt %s: planned in %.3f s", *written.place[:3], planned - began)
        return ShareWritten(share, written.measured)

    def write_for(self, seen: JointRound, node: str, slots: Mapping[int, memoryview], is_over: Callable[[], bool]) -> None:
        """Write another node's share of a sealed round, which it cannot write itself, with bytes from its slots."""
        written = self._write(seen, node, self._planned(seen, node, is_over), slots, is_over)
        self._patiently(lambda: self._rendezvous.deliver(seen.id, written.receipt, node), is_over)

    def _write(
        self, seen: JointRound, node: str, share: SharePlan, slots: Mapping[int, memoryview], is_over: Callable[[], bool]
    ) -> _Written:
        plan, began = share.plan, time.monotonic()
        place = Place(plan.run, plan.step, plan.attempt, seen.id)
        timed = FsyncTimed(self._control.store.begin(place))
        peers = Peers(seen, self._node, self._exchange.secrets(), is_over, lambda: self._rendezvous.rounds(seen.id))
        ranks = next(one.ranks for one in seen.parts if one.node == node)
        what = NodeShare(share.shares, share.block_bytes, ranks)
        size = sum(one.end - one.begin for one in share.shares)
        schedule = Schedule(size, self._history.disk.bytes_per_second)
        try:
            with self._history.writing():
                receipt = write_share(timed, plan, SlotSources(slots, peers.bring, is_over), what, self._node, schedule)
        finally:
            peers.close()
        took_s = time.monotonic() - began
        self._history.disk.wrote(size, took_s)
        text = "%s@%s attempt %s: %d of %d bytes written by this node in %.3f s, %d bytes came from others"
        log.info(text, *place[:3], size, plan.bytes, took_s, peers.bytes_brought)
        return _Written(
            place, encode_receipt(receipt), {"write_s": took_s, "fsync_s": timed.seconds, "raised_s": schedule.raised_s}
        )

    def _patiently(self, ask: Callable[[], _Found], is_over: Callable[[], bool]) -> _Found:
        """Retry until the catalog answers: sealed slots and written files wait."""
        while True:
            try:
                return ask()
            except CatalogUnavailable as away:
                if is_over():
                    raise
                log.info("querying the catalog again: %s", away.detail)
                time.sleep(AWAY_S)

    def _planned(self, seen: JointRound, node: str, is_over: Callable[[], bool]) -> SharePlan:
        """The plan of the round, with what this node of it is to write."""
        parts = self._patiently(lambda: self._rendezvous.parts(seen.id), is_over)
        decoded = []
        for digest, declared, tables in parts:
            if digest not in self._declarations:
                while len(self._declarations) >= max(DECODED_KEPT, len(parts)):
                    del self._declarations[next(iter(self._declarations))]
                self._declarations[digest] = declaration.decode(declared)
            decoded.append((digest, part.decode(self._declarations[digest], tables)))
        me, whole = [one.node for one in seen.parts].index(node), not self._control.store.shares_files
        return share_planner.plan_share(decoded, me, whole_files=whole)


class Peers:
    """The other nodes of a round, as sources of bytes."""

    def __init__(
        self,
        seen: JointRound,
        node: str,
        secrets: Sequence[str],
        is_over: Callable[[], bool],
        look: Callable[[], JointRound],
    ) -> None:
        """`look` returns their current addresses: a restarted daemon has another one."""
        self._round, self._is_over, self._look = seen.id, is_over, look
        self._node_of = {rank: one.node for one in seen.parts for rank in one.ranks}
        self._peers = {one.node: Peer(one.node, one.url, secrets) for one in seen.parts if one.node != node}
        self._pool = ThreadPoolExecutor(max(min(len(self._peers), PEERS_AT_ONCE), 1), "holdfast-peer")
        self._looking = threading.Lock()
        self._looked_at = time.monotonic()
        self.bytes_brought = 0

    def bring(self, ranges: Sequence[SlotRange], into: Mapping[int, memoryview]) -> None:
        """Copy these ranges of slots of other nodes to the same places of `into`."""
        by_node: dict[str, list[SlotRange]] = {}
        for one in ranges:
            by_node.setdefault(self._node_of[one.rank], []).append(one)
        limit = time.monotonic() + PEER_PATIENCE_S

        def go_on(wait_s: float) -> bool:
            if self._is_over() or time.monotonic() > limit:
                return False
            time.sleep(wait_s)
            self._find_again()
            return True

        jobs = [self._pool.submit(self._peers[node].fetch, self._round, some, into, go_on) for node, some in by_node.items()]
        for job in jobs:
            job.result()
        self.bytes_brought += sum(one.length for one in ranges)

    def _find_again(self) -> None:
        with self._looking:
            if time.monotonic() - self._looked_at < LOOK_AGAIN_S:
                return
            self._looked_at = time.monotonic()
            try:
                state = self._look()
            except CatalogUnavailable as away:
                log.info("cannot find the addresses of other nodes: %s", away.detail)
                return
            for one in state.parts:
                if one.node in self._peers:
                    self._peers[one.node].move_to(one.url)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for peer in self._peers.values():
            peer.close()
