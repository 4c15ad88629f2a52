"""What nodes say of their averages, on a real PostgreSQL: each hears the others, the newest word first, and is woken."""

from __future__ import annotations

import threading

from holdfast_formats.staging.joint import AverageVote
from holdfast_service.control.database.cluster_schema import AverageVoteRow
from holdfast_service.wings.cluster.notify_listener import NotifyListener
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


def test_a_node_hears_what_others_have_said_last(nodes: Nodes) -> None:
    """And nothing of other attempts; a word that is said again replaces the one before."""
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    first = AverageVote((0, 1), 7, "abc", 6)
    assert a.votes.cast("run", 1, first) == []
    assert b.votes.cast("run", 1, AverageVote((2,), 7, "", 0)) == [first]
    assert c.votes.cast("run", 2, AverageVote((3,), 1, "", 0)) == []
    later = AverageVote((0, 1), 2**60, "def", 2**59)
    a.votes.cast("run", 1, later)
    assert c.votes.cast("run", 1, AverageVote((3,), 8, "", 0)) == [later, AverageVote((2,), 7, "", 0)]


def test_who_listens_is_woken(nodes: Nodes) -> None:
    """By a ring of its own: rounds and checks are not looked at for it."""
    a, b = nodes.add("a"), nodes.add("b")
    heard: list[str] = []
    ready = threading.Event()

    def averaging() -> None:
        heard.append("average")
        ready.set()

    listener = NotifyListener(b.database, lambda: heard.append("round"), lambda: heard.append("check"), averaging)
    try:
        assert ready.wait(180)  # it has looked once, when it began to listen
        before = list(heard)
        a.votes.notify()
        wait_until(lambda: len(heard) > len(before))
        assert heard[len(before) :] == ["average"]
    finally:
        listener.close()


def test_words_of_older_attempts_are_forgotten(nodes: Nodes) -> None:
    """Once the run's record has a newer one, or there is no such run."""
    a = nodes.add("a")
    a.votes.cast("run", 1, AverageVote((0,), 7, "abc", 6))
    a.rounds.forget()
    with a.database.apart() as session:
        assert session.query(AverageVoteRow).count() == 0
