"""Duties are one node's at a time and pass on when it is gone; locks keep two nodes from deciding at once."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select, text

from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.control.database import engines
from holdfast_service.control.database.cluster_schema import DutyRow
from holdfast_service.wings.cluster.membership import later
from tests.databases import Postgres
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


def test_a_duty_is_one_nodes(nodes: Nodes) -> None:
    """Whoever asks first has it, and keeps it as long as it renews it."""
    a, b = nodes.add("a"), nodes.add("b")
    assert a.duties.has("scrub") and not b.duties.has("scrub") and a.duties.has("scrub")
    assert b.duties.has("upkeep")
    assert {member.name: member.duties for member in a.membership.members()} == {"a": ("scrub",), "b": ("upkeep",)}


@pytest.mark.parametrize("how", ["leaves", "is gone"])
def test_another_node_takes_a_duty_over(nodes: Nodes, how: str) -> None:
    """At once where the first one says goodbye, and when its lease ends where it does not."""
    a, b = nodes.add("a"), nodes.add("b")
    assert a.duties.has("scrub") and not b.duties.has("scrub")
    if how == "leaves":
        a.close()
    else:
        nodes.lapse(a)
    assert b.duties.has("scrub")
    assert not a.duties.has("scrub")


def test_a_duty_is_renewed_with_the_beat(nodes: Nodes) -> None:
    """A duty lasts as long as its node's beats, and one that became another's is not taken back."""
    a, b = nodes.add("a"), nodes.add("b")
    a.duties.has("scrub")
    nodes.left(a, 10)
    assert a.membership.beat()
    a.duties.renew()
    with a.database.read() as session:
        assert session.scalars(select(DutyRow).where(DutyRow.until > later(20))).all()
    assert not b.duties.has("scrub")
    a.duties.give_up("scrub")
    assert b.duties.has("scrub")
    a.duties.renew()
    assert not a.duties.has("scrub")


def test_who_is_no_member_has_no_duty(nodes: Nodes) -> None:
    """A node that was fenced off, or never joined, does nothing for the others (I16)."""
    stranger = nodes.add("stranger", joined=False)
    late = nodes.add("late")
    nodes.lapse(late)
    assert not stranger.duties.has("scrub") and not late.duties.has("scrub")


def test_a_lock_is_one_nodes_at_a_time(nodes: Nodes) -> None:
    """The second one waits until the first one is done; of another name it does not."""
    a, b = nodes.add("a"), nodes.add("b")
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait()
        with b.locks.locked("deciding run"):
            order.append("b")

    thread = threading.Thread(target=second)
    thread.start()
    with a.locks.locked("deciding run"):
        inside.set()
        with b.locks.locked("deciding another"):
            order.append("another")
        thread.join(0.3)
        order.append("a")
    thread.join(180)
    assert order == ["another", "a", "b"]


def test_a_lock_ends_with_its_nodes_connection(nodes: Nodes) -> None:
    """A node that is cut off holds up nobody, and learns that it has lost the lock."""
    a, b = nodes.add("a"), nodes.add("b")
    with a.locks.locked("deciding run") as still:
        still()
        with b.database.apart() as session:
            others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            session.execute(text(f"{others} AND datname = current_database()"))
        with b.locks.locked("deciding run"), pytest.raises(CatalogUnavailable):
            still()
        with pytest.raises(CatalogUnavailable):
            still()


@pytest.mark.parametrize("asks", [True, False])
def test_a_lock_is_taken_from_a_node_that_is_gone(postgres: Postgres, monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """Unless what is done under it never asks whether it was lost. A member keeps it, but from who insists."""
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 1)
    url = postgres.take()
    made = Nodes(url)
    a, b = made.add("a"), made.add("b")
    with a.locks.locked("deciding run", asks=asks) as still:
        with (
            pytest.raises(CatalogUnavailable, match="daemon of node a" if asks else "another daemon"),
            b.locks.locked("deciding run"),
        ):
            pass
        still()
        made.lapse(a)
        if asks:
            with b.locks.locked("deciding run"), pytest.raises(CatalogUnavailable):
                still()
        else:
            with pytest.raises(CatalogUnavailable), b.locks.locked("deciding run", insists=True):
                pass
            still()
    with (
        b.locks.locked("deciding run") as still,
        a.locks.session("deciding run", shared=True, insists=True),
        pytest.raises(CatalogUnavailable),
    ):
        still()
    made.close()
    postgres.give_back(url)


def test_a_beat_takes_over_the_duties_of_a_node_that_is_gone(nodes: Nodes) -> None:
    """Of those that the node has asked for, as it can do them; not what a live node has, and not while it is no member."""
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    assert a.duties.has("scrub") and a.duties.has("upkeep") and not b.duties.has("scrub")
    b.duties.renew()
    c.duties.renew()
    assert {member.name: member.duties for member in c.membership.members()}["a"] == ("scrub", "upkeep")
    nodes.lapse(a)
    c.duties.renew()
    b.duties.renew()
    assert {member.name: member.duties for member in c.membership.members()} == {"a": (), "b": ("scrub",), "c": ()}
    nodes.lapse(b)
    b.duties.renew()
    assert {member.name: member.duties for member in c.membership.members()}["b"] == ()
