"""Nodes hear at once when a round changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from holdfast_service.wings.cluster import notify_listener
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


class Ear:
    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def heard(self, wait_s: float) -> bool:
        found = self._rung.wait(wait_s)
        self._rung.clear()
        return found


@pytest.fixture
def ear(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    """Of a node that listens."""
    monkeypatch.setattr(notify_listener, "AGAIN_S", 0.1)
    monkeypatch.setattr(notify_listener, "LISTEN_S", 0.2)
    made = Ear()
    listening = NotifyListener(nodes.add("b").database, made.ring)
    assert made.heard(60)  # it listens
    yield made
    listening.close()


def test_a_change_on_another_node_is_heard(nodes: Nodes, ear: Ear) -> None:
    """That the parts are complete, and that it is committed; not the receipts: who brings the last one goes on by itself."""
    a = nodes.add("a")
    number = a.rendezvous.arrive("run", 1, 1, 2, [0], b"declared", b"said")
    c = nodes.add("c")
    c.rendezvous.arrive("run", 1, 1, 2, [1], b"declared", b"said")
    assert not ear.heard(0.3)
    c.rendezvous.seal(number)
    assert ear.heard(60)
    a.rendezvous.deliver(number, b"done")
    c.rendezvous.deliver(number, b"done")
    assert not ear.heard(0.3)
    assert a.rendezvous.claim(number)
    a.rendezvous.committed(number)
    assert ear.heard(60)


def test_what_was_missed_is_looked_for(nodes: Nodes, ear: Ear) -> None:
    """The server ends the connection: as soon as it listens again, it looks."""
    a = nodes.add("a")
    with a.database.apart() as session:
        others = "pid <> pg_backend_pid() AND query LIKE 'LISTEN%'"
        session.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    assert ear.heard(60)


def test_it_ends_when_it_is_told_to(nodes: Nodes) -> None:
    """Also where there is no server to listen to."""
    cluster = nodes.add("a")
    listening = NotifyListener(cluster.database, lambda: None)
    closing = threading.Thread(target=listening.close, daemon=True)
    closing.start()
    closing.join(180)
    assert not closing.is_alive()
