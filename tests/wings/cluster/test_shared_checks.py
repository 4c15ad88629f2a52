"""Checks that several nodes share: portions are claimed once, taken over, and told of only by who has the claim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CorruptExtent
from holdfast_formats.staging.shared_check import CheckedCheckpoint, PortionPlan
from holdfast_service.control.database.cluster_schema import PortionRow, SharedCheckRow
from holdfast_service.wings.cluster.membership import later
from holdfast_service.wings.cluster.shared_checks import SharedChecks
from tests.control.published import a_manifest, put_checkpoint
from tests.regressions.test_daemons_that_share_a_root import RUN, Node
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
OF = CheckedCheckpoint(RUN, 1, "a" * 64, None, True)


class Three:
    """Nodes a, b and c; a has committed a checkpoint, and begun its check in three portions."""

    def __init__(self, nodes: Nodes, root: Path) -> None:
        self.nodes = nodes
        self.all = [Node(nodes, root, name) for name in "abc"]
        self.checks = [_checks(node) for node in self.all]
        self.made: Manifest = a_manifest(RUN, 1)
        put_checkpoint(self.all[0].tier, self.made)
        self.all[0].control.saves.record(self.made)
        self.plans = [PortionPlan(((number * 10, number * 10 + 10),), name) for number, name in enumerate("bca")]
        self.checks[0].begin(OF, self.plans)

    def age(self, seconds: float) -> None:
        """The check was begun so long ago."""
        with self.all[0].cluster.database.write() as session:
            session.execute(update(SharedCheckRow).values(begun=later(-seconds)))

    def end_claims(self) -> None:
        """Nothing was heard of any portion for as long as a claim lasts."""
        with self.all[0].cluster.database.write() as session:
            session.execute(update(PortionRow).values(until=later(-1)))

    def state(self) -> str:
        return self.all[0].catalog.checkpoint(RUN, 1).state

    def events(self, kind: str) -> int:
        return len(self.all[0].control.events.after(0, 100, RUN, kind))


def _checks(node: Node) -> SharedChecks:
    return SharedChecks(node.cluster.membership, node.control.findings)


@pytest.fixture
def three(nodes: Nodes, tmp_path: Path) -> Iterator[Three]:
    made = Three(nodes, tmp_path)
    yield made
    for node in made.all:
        node.control.close()


def test_each_takes_what_is_meant_for_it(three: Three) -> None:
    """Once; and nothing of what is meant for others, as long as they live and it has just begun."""
    a, b, c = three.checks
    for checks, number in ((c, 1), (a, 2), (b, 0)):
        portion = checks.claim()
        assert portion is not None and (portion.number, portion.spans) == (number, three.plans[number].spans)
        assert portion.of == OF and portion.mine == (checks is a) and portion.age_s < 60
        assert checks.claim() is None
    assert a.readers() == ["a", "b", "c"] and a.going() == {(RUN, 1)}


def test_what_is_left_goes_to_whoever_is_free(three: Three) -> None:
    """A node that does not come for its portion for a while, and one that is no member any more, leave it to others."""
    a, b, _ = three.checks
    three.age(11)
    first, second = a.claim(), a.claim()
    assert first is not None and first.number == 2 and second is not None and second.number == 0
    three.age(0)
    assert a.claim() is None
    three.nodes.lapse(three.all[2].cluster)
    third = b.claim()
    assert third is not None and third.number == 1
    assert three.checks[2].claim() is None  # it is no member


@pytest.mark.parametrize("how", ["dead", "slow", "another boot"])
def test_a_claim_that_ends(three: Three, how: str) -> None:
    """Its node is gone, or nothing is heard of it: another one reads the portion, and what the first says counts no more."""
    a, b, _ = three.checks
    lost = b.claim()
    assert lost is not None and b.renew(lost, 3)
    three.age(11)
    if how == "dead":
        three.nodes.lapse(three.all[1].cluster)
    elif how == "slow":
        three.end_claims()
    else:
        three.nodes.lapse(three.all[1].cluster)
        three.all[1].cluster.membership.beat()
    assert a.claim([(RUN, 1, 1), (RUN, 1, 2)]) is not None
    assert not b.renew(lost, 5)
    b.deliver(lost, b"false", ())
    b.give_back(lost)
    b.damaged(lost, CorruptExtent("it is not", file="model.safetensors"))
    assert three.state() == "committed" and three.events("checkpoint-damaged") == 0
    assert a.progress(RUN, 1) == (0, 30)


def test_one_that_is_proven_by_all_is_ended_by_one(three: Three) -> None:
    """Not before the last portion is proven; the end is claimed like a portion; only then is the checkpoint verified."""
    a, b, c = three.checks
    claimed = [checks.claim() for checks in three.checks]
    for checks, portion in zip(three.checks, claimed, strict=True):
        assert checks.claim_end() is None and portion is not None
        assert three.state() == "committed"
        checks.deliver(portion, f"of {portion.number}".encode(), ["replica x"] if portion.number == 1 else [])
    assert a.progress(RUN, 1, "b" * 64) is None
    first = c.claim_end()
    assert first is not None and a.claim_end() is None
    assert [(one.node, one.statistics, list(one.repaired)) for one in first.found] == [
        ("b", b"of 0", []),
        ("c", b"of 1", ["replica x"]),
        ("a", b"of 2", []),
    ]
    three.nodes.lapse(three.all[2].cluster)
    second = a.claim_end()
    assert second is not None
    c.sound(first, {"seconds": 1.0}, None, three.made)  # it had stood still
    c.leave_end(first)
    assert three.state() == "committed" and b.claim_end() is None
    a.sound(second, {"seconds": 2.0}, None, three.made)
    assert three.state() == "verified" and three.all[0].catalog.checkpoint(RUN, 1).check == {"seconds": 2.0}
    assert three.events("checkpoint-verified") == 1 and not b.any() and b.progress(RUN, 1) is None


def test_damage_of_one_portion_is_that_of_the_checkpoint(three: Three) -> None:
    """It is told of once, with the node that met it, and ends the check for all nodes."""
    a, b, c = three.checks
    mine, other = a.claim(), b.claim()
    assert mine is not None and other is not None
    b.damaged(other, CorruptExtent("two bytes are wrong", file="model.safetensors", offset=2, length=2))
    a.damaged(mine, CorruptExtent("more bytes are wrong", file="model.safetensors", offset=9, length=2))
    found = three.all[0].catalog.checkpoint(RUN, 1)
    assert found.state == "damaged" and found.damage is not None
    assert (found.damage["offset"], found.damage["node"]) == (2, "b")
    assert three.events("checkpoint-damaged") == 1
    assert not a.renew(mine, 4) and c.claim() is None and not a.any()


def test_what_is_given_back_goes_to_anybody(three: Three) -> None:
    """At once; the node that gave it back may say that it does not want it again for now."""
    a, b, _ = three.checks
    portion = b.claim()
    assert portion is not None
    b.give_back(portion)
    assert b.claim([(RUN, 1, 0)]) is None
    mine, again = a.claim(), a.claim()
    assert mine is not None and mine.number == 2
    assert again is not None and again.number == 0 and again.claim > portion.claim


def test_another_checkpoint_of_that_step(three: Three) -> None:
    """Its check takes the place of the first one, of which nothing counts any more; begun a second time, it goes on."""
    a, b, _ = three.checks
    old = b.claim()
    assert old is not None
    new = OF._replace(sha256="b" * 64)
    b.begin(new, [PortionPlan(((0, 30),), None)])
    b.drop(OF)
    b.deliver(old, b"old", ())
    a.begin(new, three.plans)
    assert a.progress(RUN, 1, "a" * 64) is None and a.progress(RUN, 1, "b" * 64) == (0, 30)
    taken = a.claim()
    assert taken is not None and taken.of == new and not taken.mine
    b.drop(new)
    assert not a.any() and not a.renew(taken, 1)
