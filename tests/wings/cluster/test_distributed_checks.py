"""Checks of several nodes: each proves its portion, and what is found is what one reader finds."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from errno import ENOENT
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.nodes import replica_duty
from holdfast_service.storage import Tier
from holdfast_service.wings.cluster import distributed_checks, shared_checks
from tests.checkpoints import flip
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes
from tests.wings.cluster.spread_world import RUN, SpreadWorld, tensors

__all__ = ["nodes"]


@pytest.fixture
def world(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpreadWorld]:
    monkeypatch.setattr(distributed_checks, "LOOK_S", 0.1)
    monkeypatch.setattr(distributed_checks, "AWAY_S", 0.1)
    made = SpreadWorld(nodes, tmp_path)
    yield made
    made.close()


def test_all_nodes_together_find_what_one_finds(world: SpreadWorld) -> None:
    """Every node reads about as much; statistics are those of one reader, bit for bit, also the change since before."""
    for name in "abc":
        world.add(name)
    for step in (1, 2, 3):
        world.commit(step)
    world.all[0].checker.check(RUN, 1)
    before = [node.checker.counts.all()["bytes"] for node in world.all]
    assert world.begin(2) is not None
    found = world.ended(2)
    assert found.state == "verified" and found.check is not None
    assert (found.check["nodes"], found.check["bytes"]) == (3, found.bytes) and len(found.check["layouts"]) == 2
    read = [node.checker.counts.all()["bytes"] - was for node, was in zip(world.all, before, strict=True)]
    assert sum(read) == found.bytes and max(read) - min(read) <= 2 * 2**15
    spread = world.all[0].control.statistics.load(RUN, 2)
    world.commit_again(2)
    world.all[0].checker.check(RUN, 2)
    alone = world.all[0].control.statistics.load(RUN, 2)
    assert {name: column.tobytes() for name, column in spread.columns.items()} == {
        name: column.tobytes() for name, column in alone.columns.items()
    }
    assert (spread["changed_from"] == 1).all() and (spread["change"] > 0).all()


def test_nan_in_one_portion(world: SpreadWorld) -> None:
    """It is the checkpoint's, which is verified, and unhealthy, before retention looks."""
    for name in "abc":
        world.add(name)
    held = tensors(1)
    held["long.1"][299, 499] = np.nan
    world.commit(1, held)
    world.begin(1)
    found = world.ended(1)
    assert (found.verified, found.healthy, found.nonfinite) == (True, False, 1)
    assert world.events("checkpoint-unhealthy") == [1]


@pytest.mark.parametrize("place", range(3))
def test_a_flipped_bit_is_found_by_whoever_reads_it(world: SpreadWorld, place: int) -> None:
    """In the first, the middle or the last file: the checkpoint is damaged, once, and the event says which node met it."""
    for name in "abc":
        world.add(name)
    built = world.commit(1)
    files = [file for file in built.manifest.files if file.header_bytes]
    file = files[(len(files) - 1) * place // 2]
    flip(world.path(1) / file.name, file.bytes - 100)
    world.begin(1)
    found = world.ended(1)
    assert found.state == "damaged" and found.damage is not None
    assert found.damage["file"] == file.name and found.damage["node"] in "abc"
    wait_until(lambda: world.events("checkpoint-damaged") == [1])
    assert not world.all[0].shared.any()


def test_damage_that_can_be_repaired(world: SpreadWorld) -> None:
    """Each node repairs what it meets; the checkpoint is verified, and says where the bytes came from."""
    for name in "ab":
        world.add(name)
    built = world.commit(1)
    copies = {path.name: path.read_bytes() for path in world.path(1).iterdir()}

    class Copies:
        def repair(self, run: str, step: int, error: Any) -> str | None:
            name = str(error.members["file"])
            (world.path(step) / name).write_bytes(copies[name])
            return "replica copy"

    for node in world.all:
        node.checker.repair = Copies().repair
    file = next(file for file in built.manifest.files if file.header_bytes)
    flip(world.path(1) / file.name, file.bytes - 100)
    world.begin(1)
    found = world.ended(1)
    assert found.state == "verified" and (found.check or {})["repaired"] == ["replica copy"]
    assert world.events("checkpoint-damaged") == []


def test_a_portion_of_a_node_that_is_lost(world: SpreadWorld, nodes: Nodes) -> None:
    """It had begun to read; its lease ends, and another node reads its portion. What it says later counts for nothing."""
    a, b = world.add("a"), world.add("b")
    stopped, go_on = threading.Event(), threading.Event()

    def stand_still(size: int) -> None:
        stopped.set()
        go_on.wait(180)

    b.heed = stand_still
    world.commit(1)
    world.begin(1)
    assert stopped.wait(180)
    nodes.lapse(b.cluster)
    found = world.ended(1)
    assert found.verified and (found.check or {})["nodes"] == 1
    go_on.set()
    assert b.spread is not None
    b.spread.close()
    wait_until(lambda: world.events("checkpoint-verified") == [1])
    assert not a.shared.any()


def test_a_node_that_closes_leaves_its_portion_to_others(world: SpreadWorld) -> None:
    """At once, in the middle; no lease has to end."""
    world.add("a")
    b = world.add("b")
    stopped = threading.Event()
    assert b.spread is not None

    def stand_still(size: int) -> None:
        stopped.set()
        b.spread._closing.wait(180)

    b.heed = stand_still
    world.commit(1)
    world.begin(1)
    assert stopped.wait(180)
    b.spread.close()
    assert (world.ended(1).check or {})["nodes"] == 1


class Blind:
    """A tier of a mount that remembers that some names are not there."""

    def __init__(self, tier: Tier, names: set[str]) -> None:
        self._tier, self._names = tier, names

    def size(self, path: str) -> int | None:
        return None if path.rpartition("/")[2] in self._names else self._tier.size(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.size(path) is None:
            raise NoSuchResource(f"there is no file {path}", errno=ENOENT)
        return self._tier.read(path, offset, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


@pytest.mark.parametrize("hidden", [{naming.COMMIT}, {naming.MANIFEST}, {"model.safetensors", naming.STATE, "config.json"}])
def test_a_node_that_does_not_see_it_yet(world: SpreadWorld, hidden: set[str]) -> None:
    """It gives its portion back, and nothing is damaged."""
    world.add("a")
    built = world.commit(1)
    hidden |= {file.name for file in built.manifest.files} if "config.json" in hidden else set()
    world.add("b", lambda tier: Blind(tier, hidden))  # type: ignore[arg-type,return-value]
    world.begin(1)
    found = world.ended(1)
    assert found.state == "verified" and (found.check or {})["nodes"] == 1
    assert world.events("checkpoint-damaged") == []


def test_what_is_missing_is_damage(world: SpreadWorld) -> None:
    """The node that has committed the checkpoint sees it all: what it does not find is not there."""
    for name in "ab":
        world.add(name)
    built = world.commit(1)
    (world.path(1) / built.manifest.files[0].name).unlink()
    world.begin(1)
    found = world.ended(1)
    assert found.state == "damaged" and (found.damage or {})["node"] == "a"


def test_one_that_is_removed_or_replaced_meanwhile(world: SpreadWorld) -> None:
    """Its check ends without a word."""
    a = world.add("a")
    world.add("b", ready=False)
    for step in (1, 2):
        world.commit(step)
        world.begin(step)
    shutil.rmtree(world.path(1))
    a.catalog.forget_checkpoint(RUN, 1)
    shutil.rmtree(world.path(2))
    world.commit(2, tensors(7))
    world.all[1].begun()
    wait_until(lambda: not a.shared.any())
    assert world.events("checkpoint-damaged") == [] == world.events("checkpoint-verified")


def test_retention_waits_for_the_whole(world: SpreadWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as one portion is not proven, the checkpoint before stays (I10); and it is said how much is."""
    monkeypatch.setattr(shared_checks, "GRACE_S", 600.0)
    a = world.add("a")
    world.add("b", ready=False)
    world.commit(1)
    a.checker.check(RUN, 1)
    a.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
    world.commit(2)
    world.begin(2)
    wait_until(lambda: (a.shared.progress(RUN, 2) or (0, 0))[0] > 0)
    going = a.shared.progress(RUN, 2)
    assert going is not None and 0 < going.done < going.total
    a.control.rotation.apply(RUN)
    assert world.path(1).exists() and not world.known(2).verified
    world.all[1].begun()
    assert world.ended(2).verified
    wait_until(lambda: not world.path(1).exists())


def test_a_small_one_is_checked_by_one(world: SpreadWorld) -> None:
    """And one of a node that is alone."""
    world.add("a")
    world.commit(1)
    assert world.begin(1) is None
    world.add("b")
    world.commit(2, {"weight": np.zeros(100, np.float32)})
    assert world.begin(2) is None and not world.all[0].shared.any()


def test_a_node_without_replicas_leaves_repairs_to_one_that_has_them(world: SpreadWorld) -> None:
    """Whichever node meets the damage: it is repaired, as if one node had checked all."""
    for name in "ab":
        world.add(name)
    built = world.commit(1)
    copies = {path.name: path.read_bytes() for path in world.path(1).iterdir()}

    class Copies:
        def repair(self, run: str, step: int, error: Any) -> str | None:
            name = str(error.members["file"])
            (world.path(step) / name).write_bytes(copies[name])
            return "replica copy"

    assert world.all[1].cluster.duties.has(replica_duty("copy"))
    world.all[1].checker.repair = Copies().repair
    for file in built.manifest.files:
        if file.header_bytes:
            flip(world.path(1) / file.name, file.bytes - 100)
    world.begin(1)
    found = world.ended(1)
    assert found.state == "verified" and set((found.check or {})["repaired"]) == {"replica copy"}
    assert world.events("checkpoint-damaged") == []


def test_one_whose_commit_cannot_be_read_is_not_divided(world: SpreadWorld) -> None:
    """The node that has committed it says what is wrong."""
    for name in "ab":
        world.add(name)
    world.commit(1)
    (world.path(1) / naming.COMMIT).write_bytes(b"?")
    assert world.begin(1) is None and not world.all[0].shared.any()
