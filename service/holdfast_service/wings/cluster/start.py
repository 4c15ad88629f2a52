"""The entrance: a daemon as one node of several that share a root and its catalog.

`SharedRoot.nodes` is what control asks of other nodes (`control/nodes.py`), and its `data_plane` what the daemon has of
them (`daemon/saving/other_nodes.py`): heartbeats, notifications, joint saves, slots of other nodes, and maintenance of the
root.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from sqlalchemy.engine import URL

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InvalidRequest, RootBusy
from holdfast_formats.rest import bodies
from holdfast_service.control.control import Control
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import PORT
from holdfast_service.control.nodes import UPKEEP
from holdfast_service.control.signals import Signal
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints, MemoryStep
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.checking.verifier import Heed
from holdfast_service.daemon.saving.other_nodes import Host, LocalRanks, LocalSaver
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.wings.cluster.average_agreement import Agreement
from holdfast_service.wings.cluster.check_claims import CheckClaims
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.distributed_checks import DistributedChecks
from holdfast_service.wings.cluster.exchange.holders import HoldingNode
from holdfast_service.wings.cluster.exchange.peer_memory import PeerMemory
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.node_ranks import NodeRanks
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from holdfast_service.wings.cluster.remote_memory import HOLDS, held_name, holders
from holdfast_service.wings.cluster.root_maintenance import RootMaintenance
from holdfast_service.wings.cluster.saving.joint_saves import JointParty, JointSaves
from holdfast_service.wings.cluster.saving.joint_writing import ShareWriter
from holdfast_service.wings.cluster.saving.rank_report_exchange import RankReportExchange
from holdfast_service.wings.cluster.shared_checks import SharedChecks

log = logging.getLogger(__name__)

UPKEEP_S = 60.0
LOOPBACK = "127.0.0.1"
EVERYWHERE = frozenset({"0.0.0.0", "::", "0"})
# What the catalog's rows say of a node, and not the node itself.
_MEMBERS = {"live", "state", "since", "heard_s", "lease_s", "duties", "runs"}


class SharedRoot:
    """A root that daemons of several nodes serve. `exchange` is the configured address for other nodes, if any."""

    def __init__(self, database: Database, node: str, exchange: tuple[str, int] | None) -> None:
        """Does not contact the database."""
        self.nodes = Cluster(database, node)
        self._exchange = exchange

    def data_plane(self, control: Control, holds: MemoryCheckpoints, stack: ExitStack) -> ClusterPlane:
        """Listens for other nodes, until the `stack` unwinds."""
        return ClusterPlane(self.nodes, control, Listening(self.nodes, self._exchange, holds, stack), stack)


class Listening:
    """The server from which other nodes read slots of this one. Its address and the secrets may change while it listens."""

    def __init__(self, cluster: Cluster, at: tuple[str, int] | None, holds: MemoryCheckpoints, stack: ExitStack) -> None:
        """`RootBusy` where it cannot listen."""
        address = _address(cluster.database.engine.url) if at is None else None
        host, port = at or (address or LOOPBACK, 0)
        if host in EVERYWHERE:  # a wildcard address reaches the caller's own machine
            raise InvalidRequest(
                f"--exchange: {host} is not an address by which other nodes can reach this one",
                hint="give an address or host name of this machine that other nodes can reach: --exchange HOST:PORT",
            )
        self._cluster, self._is_known = cluster, at is not None or address is not None
        self.secrets: tuple[str, ...] = ()  # the newest one first
        try:
            self.exchange = ExchangeServer(host, port, holds.lent, lambda: self.secrets)
        except OSError as error:
            raise RootBusy(
                f"cannot listen at {host}:{port} for other nodes: {error.strerror}",
                hint="give an address of this machine that other nodes can reach: --exchange HOST:PORT",
            ) from error
        stack.callback(self.exchange.close)
        with suppress(CatalogUnavailable):
            self.learn_secrets()

    def learn_secrets(self) -> None:
        """Again and again: they may be rotated."""
        self.secrets = self._cluster.secrets()

    def learn_address(self) -> None:
        """Find the address once the catalog answers, if its name was unknown at the start."""
        if self._is_known:
            return
        self._is_known = True
        host = _address(self._cluster.database.engine.url) or LOOPBACK
        try:
            self.exchange.move_to(host)
        except OSError as error:
            log.warning("cannot listen at %s for other nodes: %s; pass --exchange HOST:PORT", host, error)


class ClusterPlane:
    """What the daemon of this node has of the others: `OtherNodes`. Its parts hear of changes by one listener."""

    alone = False

    def __init__(self, cluster: Cluster, control: Control, listening: Listening, stack: ExitStack) -> None:
        self._cluster, self._control, self._listening, self._stack = cluster, control, listening, stack
        self._rounds: Signal[[]] = Signal()  # changed, on some node
        self._checks: Signal[[]] = Signal()  # a check of several nodes has begun
        self._votes: Signal[[]] = Signal()  # on averages
        self._ranks: Signal[[]] = Signal()  # a launch is to stop, or its last step was decided
        self.claims = CheckClaims(cluster.duties)
        self.vote = cluster.rendezvous.vote

    @property
    def url(self) -> str:
        return self._listening.exchange.url

    def agreement(self, changed: Callable[[RankSetKey], None]) -> Agreement:
        agreement = Agreement(self._cluster.votes, changed)
        self._votes.subscribe(agreement.look)
        return agreement

    def checks(self, checker: Checker, heed: Heed) -> DistributedChecks:
        shared = SharedChecks(self._cluster.membership, self._control.findings)
        checks = DistributedChecks(self._control.records, self._control, checker, shared, heed)
        self._checks.subscribe(checks.look)
        return checks

    def joint_saves(self, host: Host, history: SaveHistory) -> JointSaves:
        cluster, exchange = self._cluster, self._listening.exchange
        party = JointParty(cluster.rendezvous, exchange, cluster.node_ranks.of)
        writer = ShareWriter(self._control, cluster.node, cluster.rendezvous, exchange, history)
        joint = JointSaves(party, self._control, cluster.node, writer, host=host, history=history)
        self._rounds.subscribe(joint.look_at_all)
        return joint

    def rank_news(self, ranks: LocalRanks, stops: StopAgreement) -> RankReportExchange:
        news = RankReportExchange(self._cluster.words, self._cluster.node, ranks, stops)
        self._ranks.subscribe(news.look)
        return news

    def slots(self, spare: Callable[[], int]) -> PeerMemory:
        def find(of: MemoryStep) -> list[HoldingNode]:
            secrets = self._listening.secrets
            node_urls = holders(self._cluster.membership, of.run, of.step, of.attempt)
            return [HoldingNode(node, url, secrets) for node, url in node_urls] if secrets else []

        return PeerMemory(find, spare)

    def start(self, saver: LocalSaver, about: Callable[[], bodies.Node], held: Callable[[], Mapping[str, int]]) -> None:
        """Send heartbeats, and maintain the root while this node is on duty, until the stack unwinds."""
        cluster, control = self._cluster, self._control

        def told() -> dict[str, Any]:
            saves = [held_name(one.step.run, one.step.step, one.step.attempt) for one in saver.holds.report()]
            return {**about().model_dump(exclude=_MEMBERS), "held": dict(held()), HOLDS: saves}

        def report_ranks() -> None:
            cluster.node_ranks.report({run: NodeRanks(*rank_set) for run, rank_set in saver.connected.counts().items()})

        def look_for_newer() -> None:
            for run, newest in control.attempts.refresh(saver.connected.runs).items():
                saver.shut_out(run, newest)

        listener = NotifyListener(
            cluster.database, self._rounds.publish, self._checks.publish, self._votes.publish, self._ranks.publish
        )
        self._stack.callback(listener.close)
        self._stack.callback(DutyThread(cluster, RootMaintenance(control, cluster).run_once).close)
        after_beat = (
            report_ranks,
            cluster.duties.renew,
            lambda: cluster.holds.renew(control.readers.places()),
            self._listening.learn_secrets,
            self._listening.learn_address,
            look_for_newer,
            self._ranks.publish,
        )
        cluster.membership.start(told, after_beat)
        cluster.membership.beat_soon()


def _address(catalog: URL) -> str | None:
    """This machine's address on the route to the catalog's server; nothing is sent to it. None if its name is unknown, or it
    is unreachable.
    """
    host, port = catalog.host, catalog.port or PORT
    if not host or host.startswith("/"):
        return LOOPBACK
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        log.warning("cannot determine this machine's address towards %s until it replies: %s", host, error)
        return None


class DutyThread:
    """A thread for the cluster's maintenance, while this node is on duty."""

    def __init__(self, cluster: Cluster, look: Callable[[], None], every_s: float = UPKEEP_S) -> None:
        self._cluster, self._look, self._every_s = cluster, look, every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        self._try(lambda: None)  # so that some node is on duty from the start
        while not self._closing.wait(self._every_s):
            self._try(self._look)

    def _try(self, look: Callable[[], None]) -> None:
        try:
            if self._cluster.duties.has(UPKEEP):
                look()
        except CheckpointError as error:  # the next time does what this one could not
            log.warning("maintenance of the root is delayed: %s", error.detail)
        except Exception:
            log.exception("maintenance of the root failed")
