"""Attempts of a root that several daemons serve: one number a launch, whoever is asked, with and without the catalog."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, RunBusy, StaleAttempt
from holdfast_service.control.catalog.attempts import Attempts, Member, make_one
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.storage.posix import PosixTier
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.node_ranks import NodeRanks
from holdfast_service.wings.cluster.shared_attempts import SharedAttempts
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
RUN = "run"


class Site:
    """Several nodes on one root."""

    def __init__(self, nodes: Nodes, root: Path) -> None:
        self._nodes, self.tier = nodes, PosixTier(root)
        self.clusters: dict[str, Cluster] = {}

    def node(self, name: str) -> SharedAttempts:
        if name not in self.clusters:
            self.clusters[name] = self._nodes.add(name)
        return self.clusters[name].attempts(self.tier)

    def part(self, name: str) -> None:
        """No rank is connected to this node any more."""
        node_ranks = self.clusters[name].node_ranks
        node_ranks.parted(RUN)
        node_ranks.report({})


@pytest.fixture
def site(nodes: Nodes, tmp_path: Path) -> Site:
    return Site(nodes, tmp_path)


def away(attempts: SharedAttempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node cannot reach the catalog any more."""

    def gone(*_: object) -> None:
        raise CatalogUnavailable("away")

    monkeypatch.setattr(attempts._database, "apart", gone)


def test_numbers_go_on_from_node_to_node(site: Site) -> None:
    """The second launch is the second attempt, also where another daemon is asked; its ranks all get that."""
    a, b = site.node("a"), site.node("b")
    assert [a.declare(RUN, "first", list, Member(rank, f"s{rank}", 2)) for rank in (0, 1)] == [(1, True), (1, False)]
    site.part("a")
    assert [b.declare(RUN, "second", list, Member(rank, f"t{rank}", 2)) for rank in (0, 1)] == [(2, True), (2, False)]
    assert a.newest(RUN) == 1 and a.refresh([RUN]) == {RUN: 2} and a.newest(RUN) == 2
    assert a.refresh([RUN]) == {}
    with pytest.raises(StaleAttempt):
        a.refuse_older(RUN, 1)


def test_a_name_that_is_used_again_on_another_node_is_another_start(site: Site) -> None:
    """HOLDFAST_LAUNCH=fixed on every start: the rank that spoke on node a has an heir on node b, in a new attempt."""
    a, b = site.node("a"), site.node("b")
    assert a.declare(RUN, "fixed", list, Member(0, "first", 1)) == (1, True)
    site.part("a")
    assert b.declare(RUN, "fixed", list, Member(0, "second", 1)) == (2, True)
    site.part("b")
    assert a.declare(RUN, "fixed", list, Member(0, "third", 2)) == (3, True)


def test_a_run_that_trains_on_another_node_is_busy(site: Site) -> None:
    """Until its ranks are gone there, or it is taken over."""
    a, b = site.node("a"), site.node("b")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    with pytest.raises(RunBusy, match="on node a") as busy:
        b.declare(RUN, "second", list, Member(0, "t", 1))
    assert "HOLDFAST_TAKE_OVER" in str(busy.value.hint) and b.newest(RUN) == 0
    assert b.declare(RUN, "second", list, Member(0, "t", 1, take_over=True)) == (2, True)
    assert b.declare("other", "first", list, Member(0, "t", 1)) == (1, True)


def test_a_run_whose_ranks_are_silent_on_another_node_is_free_soon(site: Site) -> None:
    """Killed over HTTP, its ranks may live as far as their node knows: the refusal says how long that is waited for."""
    a, b = site.node("a"), site.node("b")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    here = {RUN: NodeRanks(1, 1, 1, 7.25)}
    site.clusters["a"].node_ranks.report(here)
    with pytest.raises(RunBusy) as busy:
        b.declare(RUN, "second", list, Member(0, "t", 1))
    assert busy.value.members["retry_after_s"] == 7.2
    here = {RUN: NodeRanks(1, 1, 1)}
    site.clusters["a"].node_ranks.report(here)
    with pytest.raises(RunBusy) as busy:
        b.declare(RUN, "second", list, Member(0, "t", 1))
    assert busy.value.members["retry_after_s"] == 0
    here = {RUN: NodeRanks(1, 1, 1, 0.0)}
    site.clusters["a"].node_ranks.report(here)
    assert b.declare(RUN, "second", list, Member(0, "t", 1)) == (2, True)


def test_ranks_of_one_launch_have_one_attempt_on_all_nodes(site: Site) -> None:
    """Those of a second node join it; another launch's are refused at both."""
    a, b = site.node("a"), site.node("b")
    assert a.declare(RUN, "first", list, Member(0, "s", 2)) == (1, True)
    assert b.declare(RUN, "first", list, Member(1, "t", 2)) == (1, False)
    for node in (a, b):
        with pytest.raises(RunBusy):
            node.declare(RUN, "second", list, Member(0, "u", 1))


def test_nodes_without_the_catalog_answer_alike(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one launch at two nodes ask what to restore, with the catalog, without, and when it comes back: the first
    answer holds for all; another turn has its own; those of old attempts go.
    """
    a, b, c = (site.node(name) for name in "abc")
    a.declare(RUN, "first", list, Member(0, "s", 3))
    assert a.answer(RUN, 1, 1, 5) == 5
    away(a, monkeypatch)
    away(b, monkeypatch)
    assert b.answer(RUN, 1, 1, 6) == 5
    assert a.answer(RUN, 1, 2, None) is None and b.answer(RUN, 1, 2, 6) is None
    assert b.answer(RUN, 1, 3, 8) == 8
    assert c.answer(RUN, 1, 2, 7) is None and c.answer(RUN, 1, 3, 7) == 8
    for number in range(5):
        a._give_out(RUN, f"l{number}", 1, a._claims(RUN))
    assert not any("~" in name for name in site.tier.list(naming.CLAIMS))


def test_launches_that_start_at_once_get_numbers_of_their_own(site: Site) -> None:
    """Eight nodes, eight launches that take the run over: eight numbers."""
    nodes = [site.node(f"n{number}") for number in range(8)]
    given: list[int] = []

    def declare(number: int) -> None:
        given.append(nodes[number].declare(RUN, f"l{number}", list, Member(0, f"s{number}", 1, take_over=True))[0])

    _at_once(declare)
    assert sorted(given) == list(range(1, 9))


def test_without_the_catalog_storage_gives_the_numbers_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is one launch's, of eight that ask at once without SQL; and SQL then goes on behind them."""
    nodes = [site.node(f"n{number}") for number in range(8)]
    watcher = site.node("watcher")
    assert watcher.declare(RUN, "before", list, Member(0, "w", 1)) == (1, True)
    site.part("watcher")
    for one in nodes:
        away(one, monkeypatch)
    given: list[int] = []

    def declare(number: int) -> None:
        given.append(nodes[number].declare(RUN, f"l{number % 4}", list, Member(number // 4, f"s{number}", 2))[0])

    _at_once(declare)
    assert sorted(set(given)) == [2, 3, 4, 5] and len(given) == 8  # four launches of two ranks
    assert watcher.declare(RUN, "after", list, Member(0, "w2", 1)) == (6, True)


def test_a_launch_that_began_without_the_catalog_is_the_same_one_with_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second rank comes when the catalog is back, to a node that has not been told."""
    a, b = site.node("a"), site.node("b")
    away(a, monkeypatch)
    assert a.declare(RUN, "launch", list, Member(0, "s", 2)) == (1, True)
    assert b.declare(RUN, "launch", list, Member(1, "t", 2)) == (1, False)


def test_ranks_that_come_back_need_no_catalog(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their daemon was started anew meanwhile: what it was told is in its own file."""
    a = site.node("a")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    assert a.answer(RUN, 1, 0, 7) == 7
    again = site.node("a")
    away(again, monkeypatch)
    assert again.declare(RUN, "first", list, Member(0, "s", 1)) == (1, False)
    assert again.asked(RUN, 1, 0) == (True, 7) and again.answer(RUN, 1, 0, 9) == 7
    assert again.answer(RUN, 1, 1, 9) == 9


def test_an_answer_is_the_same_on_all_nodes(site: Site) -> None:
    """The first one counts."""
    a, b = site.node("a"), site.node("b")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    assert a.answer(RUN, 1, 0, 5) == 5 and b.answer(RUN, 1, 0, 6) == 5 and b.asked(RUN, 1, 0) == (True, 5)


@pytest.mark.parametrize("with_catalog", [True, False])
def test_what_an_older_attempt_seals_is_not_committed_behind_a_newer_ones_back(
    site: Site, monkeypatch: pytest.MonkeyPatch, with_catalog: bool
) -> None:
    """Once the newer launch was told what to restore; before, it still waits for what was sealed."""
    a, b = site.node("a"), site.node("b")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    a.refuse_overtaken(RUN, 1)
    b.declare(RUN, "second", list, Member(0, "t", 1, take_over=True))
    a.refuse_overtaken(RUN, 1)
    b.answer(RUN, 2, 0, 10)
    if not with_catalog:
        away(a, monkeypatch)
    with pytest.raises(StaleAttempt, match="attempt 2 has started on another node"):
        a.refuse_overtaken(RUN, 1)
    b.refuse_overtaken(RUN, 2)


def test_a_lost_catalog_gives_no_number_out_twice(site: Site) -> None:
    """An empty database in its place: the claims in the root say where to go on."""
    a = site.node("a")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    site.part("a")
    with a._database.apart() as session:
        session.execute(text("TRUNCATE runs, attempts, speakers, answers CASCADE"))
    assert site.node("b").declare(RUN, "second", list, Member(0, "t", 1)) == (2, True)


def test_attempts_of_a_daemon_that_served_alone_are_known(site: Site) -> None:
    """A root that comes from one machine goes on where it was."""
    alone = Attempts(site.tier)
    alone.merge({})
    for number in range(3):
        alone.declare(RUN, f"old-{number}", list)
    assert site.node("a").declare(RUN, "new", list, Member(0, "s", 1)) == (4, True)


def test_a_root_that_goes_back_to_one_daemon_gives_no_number_out_twice(site: Site) -> None:
    """What each node knew, and claims of which no file tells, count; nothing of them is left."""
    a, b = site.node("a"), site.node("b")
    a.declare(RUN, "first", list, Member(0, "s", 1))
    a.answer(RUN, 1, 0, 5)
    site.part("a")
    b.declare(RUN, "second", list, Member(0, "t", 1))
    b.declare("other", "second", list, Member(0, "t", 1))
    site.tier.put(naming.claim_file(RUN, 7), b"lost")
    make_one(site.tier)
    alone = Attempts(site.tier)
    assert alone.complete and alone.newest(RUN) == 7 and alone.newest("other") == 1 and alone.asked(RUN, 1, 0) == (True, 5)
    assert alone.declare(RUN, "third", list) == (8, True)
    assert site.tier.list("") == [naming.ATTEMPTS]
    make_one(site.tier)


def test_old_claims_go(site: Site) -> None:
    """A run that starts often leaves a handful of them."""
    a = site.node("a")
    for number in range(10):
        a.declare(RUN, f"l{number}", list, Member(0, f"s{number}", 1))
    left = [naming.parse_claim_file(name) for name in site.tier.list(naming.CLAIMS)]
    assert sorted(left) == [(RUN, number) for number in (7, 8, 9, 10)]


def test_what_another_node_is_writing_is_waited_for(site: Site) -> None:
    """A sealed save of a node that lives, not an open one, and not one of a node that is gone."""
    a, b = site.node("a"), site.node("b")
    catalog = Catalog(a._database, "a")
    number, _ = catalog.rounds.open(RUN, 1, 1, 1, "2026-01-01T00:00:00Z")
    assert not b.sealed_elsewhere(RUN)
    catalog.rounds.update(number, sealed=1)
    assert b.sealed_elsewhere(RUN) and not a.sealed_elsewhere(RUN)
    site.clusters["a"].close()
    assert not b.sealed_elsewhere(RUN)


def _at_once(act: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=act, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
