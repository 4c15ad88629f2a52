"""Thinning and compacting are one node's duty: the other does nothing, takes over, and meets nothing half done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.database import engines
from holdfast_service.control.nodes import THINNING
from holdfast_service.daemon.copying.thinner import Thinner
from tests.checkpoints import build_root, trained_arrays
from tests.control.published import mark_verified
from tests.regressions.test_daemons_that_share_a_root import Node
from tests.regressions.test_nodes_that_stand_still import WAITS_S, Still, Stopping
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
RUN, STEPS = "tiny", (5, 10, 15)


class Pair:
    """Two nodes, a root with verified checkpoints, and a policy that thins the oldest and compacts the next."""

    def __init__(self, nodes: Nodes, root: Path) -> None:
        self.nodes, self.root = nodes, root
        build_root(root, {RUN: STEPS}, trained_arrays())
        self.tier = Stopping(root, "a")
        self.a, self.b = Node(nodes, root, "a", tier=self.tier), Node(nodes, root, "b")
        for step in STEPS:
            mark_verified(self.a.catalog, RUN, step)
        policy = RetentionPolicy(optim="int8", optim_full=1, keep_full=2)
        self.a.control.rotation.set_policy(RUN, policy, "*")
        assert self.a.control.rotation.wait_until_applied()

    def thinner(self, node: Node, record_queue: Any = None) -> Thinner:
        control = node.control
        return Thinner(control.store, record_queue or control.thinning, node=control.nodes.node)

    def forms(self) -> list[str]:
        """What stands there, every byte proven, and the catalog with both nodes says the same."""
        found = []
        for step in STEPS:
            with open_checkpoint(self.root, None, RUN, step) as reader:
                assert reader.verify() == []
                made = reader.manifest
                weights = reader.read("model", "embed.weight")
            assert np.array_equal(weights.view(np.uint16), trained_arrays()["model"]["embed.weight"].view(np.uint16))
            for node in (self.a, self.b):
                assert node.control.record_queue.recorded(30)
                listed = node.catalog.checkpoint(RUN, step)
                assert (listed.thinned is None, listed.compacted is None) == (made.thinned is None, made.compacted is None)
            found.append("thin" if made.thinned else "compact" if made.compacted else "whole")
        return found


@pytest.fixture
def pair(nodes: Nodes, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(nodes, tmp_path)
    yield made
    for node in (made.a, made.b):
        node.control.close()


def test_one_node_does_it(pair: Pair) -> None:
    """Whoever asks first, all of it; the other finds nothing due."""
    assert pair.thinner(pair.b).run_once(RUN) == [5, 10]
    assert pair.thinner(pair.a).run_once(RUN) == []
    assert {one.name: THINNING in one.duties for one in pair.a.cluster.membership.members()} == {"a": False, "b": True}
    assert pair.forms() == ["thin", "compact", "whole"]


@pytest.mark.parametrize("how", ["is gone", "leaves"])
def test_another_node_takes_over_in_the_middle(pair: Pair, how: str) -> None:
    """A node that is fenced off with all of it staged publishes nothing; the other begins anew, in a place of its own."""
    thinning = pair.a.control.thinning
    places: list[str] = []

    class Late:
        """The node has stood still for longer than its lease when it publishes."""

        due, clear = thinning.due, thinning.clear

        def publish(self, place: Any, *parts: Any) -> Any:
            places.append(place.path)
            if len(places) == 1:
                pair.nodes.lapse(pair.a.cluster) if how == "is gone" else pair.a.cluster.duties.give_up(THINNING)
                assert pair.b.cluster.duties.has(THINNING)
            return thinning.publish(place, *parts)

    assert pair.thinner(pair.a, Late()).run_once(RUN) == []
    assert pair.forms() == ["whole"] * 3
    assert len(places) == 1 and pair.a.tier.list(f"{RUN}/{naming.STAGING}") == []
    assert pair.thinner(pair.b).run_once(RUN) == [5, 10]
    assert pair.forms() == ["thin", "compact", "whole"]
    assert pair.thinner(pair.a).run_once(RUN) == []


def test_what_another_node_reads_stays_as_it_is(pair: Pair) -> None:
    """Until it has been read."""
    with pair.b.control.readers.reading(RUN, 5), pair.b.control.readers.reading(RUN, 10):
        assert pair.thinner(pair.a).run_once(RUN) == []
    pair.b.cluster.holds.renew(pair.b.control.readers.places())
    assert pair.thinner(pair.a).run_once(RUN) == [5, 10]


@pytest.mark.parametrize("wants", ["pins", "reads"])
def test_a_node_that_stands_still_while_it_thins_puts_back_what_it_took(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, wants: str
) -> None:
    """Node a stands still just before the thin checkpoint takes the place of the whole one, and node b begins to want that:
    the whole one stands there afterwards.
    """
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", WAITS_S)
    reading = pair.b.control.readers.reading(RUN, 5)
    pair.tier.before = naming.checkpoint_path(RUN, 5)
    with Still(pair.tier, lambda: pair.thinner(pair.a).run_once(RUN)) as still:
        if wants == "pins":
            pair.nodes.lapse(pair.a.cluster)
            pair.b.control.rotation.mark(RUN, 5, lambda file: run_files.pinned(file, 5))
        else:
            reading.__enter__()
    assert isinstance(still.error, CatalogUnavailable) and pair.forms() == ["whole"] * 3
    assert pair.b.tier.list(f"{RUN}/{naming.STAGING}") == []
    if wants == "reads":
        reading.__exit__(None, None, None)
