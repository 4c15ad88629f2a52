"""The order in which nodes write the rounds that they save together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from holdfast_service.daemon.saving.rounds import RoundKey
from holdfast_service.storage import MemoryTier, PosixStore
from holdfast_service.wings.cluster.saving import joint_writing
from tests.cluster import meeting_nodes as meeting
from tests.cluster.meeting_nodes import RUN, MeetingNode
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


@pytest.fixture
def pair(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MeetingNode, MeetingNode, MemoryTier]]:
    """Two nodes with a rank each, whose threads run when a test says so."""
    meeting.still(monkeypatch)
    monkeypatch.setattr(joint_writing, "PEER_PATIENCE_S", 0.0)
    tier = MemoryTier()
    made = [MeetingNode(nodes, tier, name, rank, 2) for rank, name in enumerate("ab")]
    for node in made:
        node.control.launches.declare(RUN, "launch 1", 2, None, node.rank, f"rank {node.rank}")
    yield made[0], made[1], tier
    for node in made:
        node.die()


def test_rounds_that_become_complete_while_a_node_looks_at_them(
    pair: tuple[MeetingNode, MeetingNode, MemoryTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node b brings both of its parts after node a has found step 1 open, and before it looks at step 2: node a writes
    step 1 first all the same. Else it waited for bytes of step 2, which node b offers once step 1 has ended.
    """
    a, b, tier = pair
    for step in (1, 2):
        for node in (a, b):
            assert node.save(RoundKey(RUN, step, 1))
    looks_at, looked = a.joint._go_on, list[int]()

    def look(joint: Any) -> None:
        looked.append(joint.current.key.step)
        looks_at(joint)
        if len(looked) == 1:
            b.step()

    monkeypatch.setattr(a.joint, "_go_on", cast(Any, look))
    a.step()
    assert looked[:2] == [1, 2]
    for _ in range(10):
        for node in (b, a):
            node.write()
            node.step()
    assert [told.error for node in (a, b) for told in node.told] == [None] * 4
    assert PosixStore(tier).steps(RUN) == [1, 2]
