"""The care of a root: by one node at a time, and by another one when that is gone."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast_service.control.nodes import UPKEEP
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.start import LOOPBACK, DutyThread, Listening
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


class Cared:
    """Counts how often it is looked after."""

    def __init__(self) -> None:
        self.times = 0
        self.fails = False
        self._lock = threading.Lock()

    def look(self) -> None:
        with self._lock:
            self.times += 1
        if self.fails:
            raise RuntimeError("the disk is away")


def caring(cluster: Cluster, cared: Cared) -> DutyThread:
    return DutyThread(cluster, cared.look, every_s=0.05)


def test_one_node_cares_and_the_next_one_takes_over(nodes: Nodes) -> None:
    """A failure does not end it; a node that is gone does, and then the other one begins."""
    a, b = nodes.add("a"), nodes.add("b")
    first, second = Cared(), Cared()
    first.fails = True
    a.membership.start(after_beat=[a.duties.renew])
    of_a = caring(a, first)
    wait_until(lambda: first.times > 3)
    of_b = caring(b, second)
    wait_until(lambda: first.times > 10)
    assert second.times == 0
    of_a.close()
    a.close()
    wait_until(lambda: second.times > 3)
    of_b.close()
    assert b.duties.has(UPKEEP)


def test_the_address_is_found_once_the_catalog_answers(nodes: Nodes) -> None:
    """A daemon that starts while the catalog's name means nothing listens where others reach it as soon as the name does."""
    node = nodes.add("a")
    means = socket.getaddrinfo

    def nothing(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def loopback(*_: Any, **__: Any) -> Any:
        return means("::1", 0, type=socket.SOCK_DGRAM)

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", nothing)
        holds = MemoryCheckpoints(lambda run, step: None)
        listening = Listening(node, None, holds, stack)
        exchange = listening.exchange
        assert exchange.url.startswith(f"http://{LOOPBACK}:")
        patched.setattr(socket, "getaddrinfo", loopback)
        node.membership.start(after_beat=[listening.learn_address])
        node.membership.beat_soon()
        wait_until(lambda: exchange.url.startswith("http://[::1]:"))
        assert Listening(node, None, holds, stack).exchange.url.startswith("http://[::1]:")
