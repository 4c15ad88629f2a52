"""Starts a daemon's part in a cluster: heartbeats, notifications of other nodes, and maintenance of the root."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from sqlalchemy.engine import URL

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InvalidRequest, RootBusy
from holdfast_service.control.database.engines import PORT
from holdfast_service.control.opening import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints, MemoryStep
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.wings.cluster.cluster import Cluster, NodeRanks
from holdfast_service.wings.cluster.duties import UPKEEP
from holdfast_service.wings.cluster.exchange.holders import HoldingNode
from holdfast_service.wings.cluster.exchange.peer_memory import PeerMemory
from holdfast_service.wings.cluster.exchange.server import ExchangeServer
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from holdfast_service.wings.cluster.remote_memory import holders
from holdfast_service.wings.cluster.saving.joint_saves import JointParty

log = logging.getLogger(__name__)

UPKEEP_S = 60.0
LOOPBACK = "127.0.0.1"
EVERYWHERE = frozenset({"0.0.0.0", "::", "0"})


def take_part(
    cluster: Cluster, control: Control, saver: Saver, about: Callable[[], dict[str, Any]], stack: ExitStack
) -> None:
    """Send heartbeats, and maintain the root while this node is on duty, until the `stack` unwinds."""
    heard = cluster.membership.listeners
    heard.insert(
        0, lambda: cluster.node_ranks.report({run: NodeRanks(*rank_set) for run, rank_set in saver.node_ranks().items()})
    )

    def look_for_newer() -> None:
        for run, newest in control.attempts.refresh(saver.runs).items():
            saver.shut_out(run, newest)

    cluster.membership.listeners.append(look_for_newer)
    cluster.membership.listeners.append(saver.look_at_ranks)
    probe = (saver.look_at_others, saver.look_at_checks, saver.look_at_averages, saver.look_at_ranks)
    listener = NotifyListener(cluster.database, *probe)
    stack.callback(listener.close)
    assert control.maintenance is not None
    stack.callback(DutyThread(cluster, control.maintenance.run_once).close)
    cluster.membership.start(about)
    cluster.membership.beat_soon()


def party(cluster: Cluster, at: tuple[str, int] | None, holds: MemoryCheckpoints, stack: ExitStack) -> JointParty:
    """What this node needs for joint saves; it listens from now on. `at` is the configured address, if any."""
    address = _address(cluster.database.engine.url) if at is None else None
    host, port = at or (address or LOOPBACK, 0)
    if host in EVERYWHERE:  # a wildcard address reaches the caller's own machine
        raise InvalidRequest(
            f"--exchange: {host} is no address at which other nodes reach this one",
            hint="give the address or host name of this machine that other nodes reach: --exchange HOST:PORT",
        )
    try:
        exchange = ExchangeServer(host, port, holds.lent)
    except OSError as error:
        raise RootBusy(
            f"cannot listen at {host}:{port} for other nodes: {error.strerror}",
            hint="give an address of this machine that other nodes reach: --exchange HOST:PORT",
        ) from error
    stack.callback(exchange.close)

    def learn_secrets() -> None:  # again and again: they may be rotated
        exchange.accept(cluster.secrets())

    def learn_address() -> None:
        """Find the address now that the catalog answers, if its name was unknown at the start."""
        cluster.membership.listeners.remove(learn_address)
        host = _address(cluster.database.engine.url) or LOOPBACK
        try:
            exchange.move_to(host)
        except OSError as error:
            log.warning("cannot listen at %s for other nodes: %s; pass --exchange HOST:PORT", host, error)

    with suppress(CatalogUnavailable):
        learn_secrets()
    cluster.membership.listeners.append(learn_secrets)
    if at is None and address is None:
        cluster.membership.listeners.append(learn_address)
    return JointParty(cluster.rendezvous, exchange, cluster.node_ranks.of, cluster.words)


def peer_memory(cluster: Cluster, exchange: ExchangeServer, arena: Arena) -> PeerMemory:
    """Other nodes' in-memory checkpoints for ranks of this node."""

    def find(of: MemoryStep) -> list[HoldingNode]:
        node_urls = holders(cluster.membership, of.run, of.step, of.attempt)
        return [HoldingNode(node, url, exchange.secrets) for node, url in node_urls] if exchange.secrets else []

    return PeerMemory(find, lambda: arena.spare_bytes)


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
        log.warning("cannot tell from which address %s is reached, until it answers: %s", host, error)
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
            log.warning("the root was not looked after: %s", error.detail)
        except Exception:
            log.exception("the root was not looked after")
