"""What nodes say of their ranks, on a real PostgreSQL: since when and until when it held, and that one decision stands."""

from __future__ import annotations

import threading

from holdfast_service.control.database.cluster_schema import RanksWordRow
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


def test_the_same_said_again_holds_since_the_first_time(nodes: Nodes) -> None:
    """By the database's clock. Something else, and the same after it, begins again."""
    a = nodes.add("a").words
    (first,) = a.report("run", 1, "waiting", {"x": [1]})
    (again,) = a.report("run", 1, "waiting", {"x": [1]})
    assert first.since == again.since < again.until and again.live
    (other,) = a.report("run", 1, "waiting", {"x": [2]})
    assert other.said == {"x": [2]} and again.until < other.since


def test_each_node_hears_all_of_the_topic_and_launch(nodes: Nodes) -> None:
    """And which of them are no members any more, or have been started again since."""
    a, b = nodes.add("a"), nodes.add("b")
    a.words.report("run", 1, "waiting", {"of": "a"})
    a.words.report("run", 2, "waiting", {"of": "another launch"})
    a.words.report("run", 1, "stopping", {"of": "another topic"})
    assert [(word.node, word.said["of"]) for word in b.words.report("run", 1, "waiting", {"of": "b"})] == [
        ("a", "a"),
        ("b", "b"),
    ]
    nodes.lapse(a)
    assert [word.live for word in b.words.reports("run", 1, "waiting")] == [False, True]


def test_the_first_decision_stands(nodes: Nodes) -> None:
    """Whatever another node has found, and however often it is asked."""
    a, b = nodes.add("a").words, nodes.add("b").words
    assert a.decided("run", 1, "stopping") is None
    assert a.decide("run", 1, "stopping", {"step": 7}) == {"step": 7}
    assert b.decide("run", 1, "stopping", {"step": 8}) == {"step": 7} == b.decided("run", 1, "stopping")
    assert b.decided("run", 2, "stopping") is None
    assert [word.node for word in b.report("run", 1, "stopping", {})] == ["b"]


def test_launches_that_are_to_stop_are_found_by_their_runs(nodes: Nodes) -> None:
    """Not those of which saves are waited for."""
    a = nodes.add("a").words
    a.report("one", 3, "stopping", {})
    a.report("two", 1, "stopping", {})
    a.report("three", 1, "waiting", {})
    assert a.stopping(["one", "three"]) == [("one", 3)]


def test_who_listens_is_woken(nodes: Nodes) -> None:
    """By a ring of its own."""
    a, b = nodes.add("a"), nodes.add("b")
    heard: list[str] = []
    ready = threading.Event()

    def ranks() -> None:
        heard.append("ranks")
        ready.set()

    listener = NotifyListener(b.database, lambda: heard.append("round"), ranks=ranks)
    try:
        assert ready.wait(180)  # it has looked once, when it began to listen
        before = list(heard)
        a.words.notify()
        wait_until(lambda: len(heard) > len(before))
        assert heard[len(before) :] == ["ranks"]
    finally:
        listener.close()


def test_words_of_older_attempts_are_forgotten(nodes: Nodes) -> None:
    """Once the run's record has a newer one, or there is no such run."""
    a = nodes.add("a")
    a.words.report("run", 1, "stopping", {})
    a.rounds.forget()
    with a.database.apart() as session:
        assert session.query(RanksWordRow).count() == 0
