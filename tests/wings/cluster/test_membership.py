"""Membership: one daemon of a name at a time, by leases in the database's time, and nothing kept by one that is gone."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from sqlalchemy import select

from holdfast_formats.errors import InUse, NoSuchResource, RootBusy
from holdfast_service.control import nodes as core
from holdfast_service.control.database.cluster_schema import DutyRow, HoldRow, NodeRanksRow
from holdfast_service.wings.cluster import membership
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


def live(made: Nodes) -> dict[str, bool]:
    reader = made.add("reader", joined=False)
    return {member.name: member.live for member in reader.membership.members()}


def test_nodes_join_and_leave(nodes: Nodes) -> None:
    """A node that says goodbye is no member from that moment on; the others stay."""
    a, _ = nodes.add("a"), nodes.add("b")
    assert live(nodes) == {"a": True, "b": True}
    a.close()
    assert live(nodes) == {"a": False, "b": True}


def test_a_name_belongs_to_one_living_daemon(nodes: Nodes) -> None:
    """The one of a second machine is refused by name, and the first one keeps its membership."""
    first = nodes.add("a")
    second = nodes.add("a", joined=False)
    second.membership.me = second.membership.me._replace(machine="another")
    with pytest.raises(RootBusy, match="has the name 'a'") as refused:
        second.membership.join(0.3)
    assert "--node" in str(refused.value.hint)
    assert first.membership.beat()


def test_a_daemon_that_was_killed_here_is_not_waited_for(nodes: Nodes) -> None:
    """The next one of its name on this machine, or in another container of it, joins at once, though the lease lasts."""
    first = nodes.add("a")
    nodes.add("a")  # refused, if it had to wait at all
    with first.database.read() as session:
        assert not first.membership.is_live(session, "a", first.membership.me.boot)


def test_one_of_another_machine_is_waited_for_until_its_lease_ends(nodes: Nodes) -> None:
    """No process of another machine can be seen: only its lease tells, and the next one joins when that is over."""
    first = nodes.add("a", joined=False)
    first.membership.me = first.membership.me._replace(machine="another")
    first.membership.join(0.0)
    second = nodes.add("a", joined=False)
    with pytest.raises(RootBusy):
        second.membership.join(0.0)
    nodes.lapse(first)
    second.membership.join(0.0)
    before = first.membership.me.boot
    first.membership.me = first.membership.me._replace(machine="another")
    assert second.membership.me.boot != before and live(nodes)["a"]


def test_a_lease_that_has_ended_is_noticed_and_joined_anew(nodes: Nodes) -> None:
    """Whoever was away for longer than its lease comes back as another boot: what it had is not its own any more."""
    a = nodes.add("a")
    assert a.duties.has("scrub")
    before = a.membership.me.boot
    nodes.lapse(a)
    assert not a.membership.beat()
    assert a.membership.joined and a.membership.me.boot != before
    with a.database.read() as session:
        assert not session.scalars(select(DutyRow).where(DutyRow.boot == before)).all()


def test_time_is_the_databases(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose clock is years ahead, or behind, is as much a member as the others (I17)."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    a, b = nodes.add("a"), nodes.add("b")
    assert a.membership.beat() and b.membership.beat()
    assert all(member.live and 500 < member.lease_s <= 600 for member in a.membership.members())


def test_joining_takes_away_what_an_earlier_boot_left(nodes: Nodes) -> None:
    """Duties, ranks and holds of a daemon that was killed are nobody's."""
    a = nodes.add("a")
    a.duties.has("scrub")
    a.holds.announce("run", 1, False)
    with a.database.apart() as session:
        session.add(NodeRanksRow(run="run", node="a", boot=a.membership.me.boot, attempt=1, world=1, ranks=1))
    again = nodes.add("a")
    with again.database.read() as session:
        assert not any(session.scalars(select(table)).all() for table in (DutyRow, HoldRow, NodeRanksRow))


def test_many_join_at_once_and_one_of_each_name_is_in(nodes: Nodes) -> None:
    """Eight processes of one name on eight machines: one is a member, seven are refused."""
    made = [nodes.add("a", joined=False) for _ in range(8)]
    refused: list[RootBusy] = []

    def join(number: int) -> None:
        membership = made[number].membership
        membership.me = membership.me._replace(machine=f"machine-{number}")
        try:
            membership.join(0.0)
        except RootBusy as error:
            refused.append(error)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and sum(one.membership.joined for one in made) == 1


def test_beats_go_on_by_themselves_and_tell_who_listens(nodes: Nodes) -> None:
    """A node that has started stays a member for longer than a lease, and hears each of its beats."""
    a = nodes.add("a", lease_s=3.0, beat_s=0.3)
    heard = threading.Semaphore(0)
    a.membership.start(after_beat=[heard.release])
    assert all(heard.acquire(timeout=180) for _ in range(12))
    assert live(nodes)["a"]


def states(made: Nodes, reader: str = "reader") -> dict[str, str]:
    return {member.name: member.state for member in made.add(reader, joined=False).membership.members()}


def test_a_node_that_says_goodbye_was_stopped_and_one_that_does_not_is_lost(nodes: Nodes) -> None:
    """Whoever looks can tell the two; a node that comes back after a loss is shown as such, one that was stopped is not."""
    a, b = nodes.add("a"), nodes.add("b")
    assert states(nodes) == {"a": "live", "b": "live"}
    a.close()
    nodes.lapse(b)
    assert states(nodes) == {"a": "stopped", "b": "lost"}
    again, back = nodes.add("a"), nodes.add("b")
    assert states(nodes) == {"a": "live", "b": "returned"}
    assert again.membership.beat() and back.membership.beat()
    assert states(nodes) == {"a": "live", "b": "returned"}  # a beat does not wipe it out
    back.close()
    assert states(nodes)["b"] == "stopped"


def test_a_node_that_has_been_back_for_long_is_just_live(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it was lost is told for a while only."""
    nodes.lapse(nodes.add("a"))
    nodes.add("a")
    assert states(nodes) == {"a": "returned"}
    monkeypatch.setattr(core, "RETURNED_S", 0.0)
    assert states(nodes) == {"a": "live"}


def test_how_long_ago_a_node_was_heard_of(nodes: Nodes) -> None:
    """Of a live one since its last beat, of one that is gone since its last sign of life."""
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    nodes.left(a, 18)
    nodes.left(b, -100)
    c.close()
    nodes.left(c, -50)
    heard = {member.name: member.heard_s for member in b.membership.members()}
    assert 12 <= heard["a"] < 20 and 130 <= heard["b"] < 140 and 50 <= heard["c"] < 60


def test_only_nodes_that_are_gone_are_forgotten(nodes: Nodes) -> None:
    """A live one is refused by name, an unknown one too; a forgotten one joins again as if it were new."""
    a, b = nodes.add("a"), nodes.add("b")
    with pytest.raises(InUse, match="'b' is live"):
        a.membership.forget("b")
    with pytest.raises(NoSuchResource):
        a.membership.forget("c")
    nodes.lapse(b)
    a.membership.forget("b")
    assert states(nodes) == {"a": "live"}
    assert not b.membership.beat()
    assert states(nodes) == {"a": "live", "b": "live"}


def test_a_lost_node_is_listed_for_longer_than_a_stopped_one(nodes: Nodes) -> None:
    """Somebody is to look into a loss; who was stopped on purpose is of no interest after a while."""
    a, b = nodes.add("a"), nodes.add("b")
    a.close()
    nodes.left(a, -membership.STOPPED_S - 60)
    nodes.left(b, -membership.STOPPED_S - 60)
    nodes.add("c")
    assert states(nodes) == {"b": "lost", "c": "live"}
    nodes.left(b, -membership.LOST_S - 60)
    nodes.add("d")
    assert states(nodes) == {"c": "live", "d": "live"}


def test_a_census_counts_all_and_names_the_lost(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states as those of the list, whether nodes have joined lately or go on for long."""
    a, b, c, d = (nodes.add(name) for name in "abcd")
    nodes.lapse(b)
    c.close()
    nodes.lapse(d)
    nodes.add("d")
    for returned_s in (membership.RETURNED_S, 0.0):
        for module in (core, membership):
            monkeypatch.setattr(module, "RETURNED_S", returned_s)
        found = a.membership.census()
        assert found.lost == ("b",)
        assert found.states == Counter(states(nodes).values()) and sum(found.states.values()) == 4


def test_a_loss_is_told_once(nodes: Nodes) -> None:
    """Whichever node asks, and again when the node was back and is lost once more; a node that was stopped is not lost."""
    a, b, c = nodes.add("a"), nodes.add("b"), nodes.add("c")
    assert a.membership.newly_lost() == []
    nodes.lapse(b)
    c.close()
    assert [member.name for member in a.membership.newly_lost()] == ["b"]
    assert a.membership.newly_lost() == [] == nodes.add("d").membership.newly_lost()
    nodes.lapse(nodes.add("b"))
    assert [member.name for member in a.membership.newly_lost()] == ["b"]
