"""Two nodes commit the same round at the same moment, on a real directory with a real PostgreSQL: one checkpoint, and both
are told that it stands.
"""

from __future__ import annotations

import threading

import msgspec
import pytest
from sqlalchemy import insert

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_service.control.checkpoints import planner
from holdfast_service.control.database.cluster_schema import JointRoundRow
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.wings.cluster.membership import now
from tests.regressions.test_daemons_that_share_a_root import Node, pair
from tests.wings.cluster.nodes import nodes
from tests.wings.cluster.saving.test_part_writer import CREATED, columns
from tests.wings.cluster.saving.test_part_writer import Site as Shares

__all__ = ["nodes", "pair"]
pytestmark = pytest.mark.cluster

RUN, RACES, KEPT = "r", 1000, 3
_CLAIMED = {"attempt": 1, "world": 2, "state": "committing", "created": CREATED}


def test_two_committers_make_one_checkpoint(pair: tuple[Node, Node]) -> None:
    """A thousand races. What either leaves of its staging directory goes; nothing is removed of what stands."""
    shares = Shares(columns([500, 700], 2), [0, 1])
    tables = columns([500, 700], 2).tables()
    for node in pair:
        node.control.launches.declare(RUN, "launch", 2, KEPT)
    a, b = pair
    for step in range(1, RACES + 1):
        plan = shares.plan = planner.plan([msgspec.structs.replace(table, step=step) for table in tables])
        staged = naming.Place(RUN, step, 1, step)
        receipts = [shares.write(a.tier, 0, staged), shares.write(b.tier, 1, staged)]
        with a.catalog.database.write() as session:
            session.execute(insert(JointRoundRow).values(id=step, run=RUN, step=step, **_CLAIMED, changed=now()))
        numbers = [node.control.saves.begin(RUN, step, 1, 2) for node in pair]
        made: list[Manifest] = []
        start = threading.Barrier(2)

        def commit(node: Node, number: int) -> None:
            start.wait()  # noqa: B023 - the threads of this step
            done = node.control.saves.commit(number, plan, {}, JointlyStaged(staged, receipts, CREATED))  # noqa: B023
            made.append(done)  # noqa: B023

        threads = [threading.Thread(target=commit, args=one) for one in zip(pair, numbers, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 2 and made[0] == made[1], (step, made)
        assert verify(a.tier, naming.checkpoint_path(RUN, step)) == made[0]
        assert a.tier.list(f"{RUN}/{naming.STAGING}") == []
    for node in pair:
        assert node.control.record_queue.recorded(60)
    listed = [found.step for found in b.catalog.checkpoints(RUN, None, 100).items]
    assert RACES in listed and len(listed) == len(set(listed))
