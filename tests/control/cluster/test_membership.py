"""Membership: one daemon of a name at a time, by leases in the database's time, and nothing kept by one that is gone."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import select

from holdfast_formats.errors import RootBusy
from holdfast_service.control.database.schema import CrewRow, DutyRow, HoldRow
from tests.control.cluster.nodes import Nodes, nodes

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
    with pytest.raises(RootBusy, match="called 'a'") as refused:
        second.membership.join(0.3)
    assert "--node" in str(refused.value.hint)
    assert first.membership.beat()


def test_a_daemon_that_was_killed_here_is_not_waited_for(nodes: Nodes) -> None:
    """The next one of its name on this machine, or in another container of it, joins at once, though the lease lasts."""
    first = nodes.add("a")
    began = time.monotonic()
    nodes.add("a")
    assert time.monotonic() - began < 5
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
        session.add(CrewRow(run="run", node="a", boot=a.membership.me.boot, attempt=1, world=1, ranks=1))
    again = nodes.add("a")
    with again.database.read() as session:
        assert not any(session.scalars(select(table)).all() for table in (DutyRow, HoldRow, CrewRow))


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
    a.membership.heard.append(heard.release)
    a.membership.start()
    assert all(heard.acquire(timeout=30) for _ in range(12))
    assert live(nodes)["a"]
