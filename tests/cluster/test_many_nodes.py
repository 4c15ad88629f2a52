"""Dozens of nodes in one process save one checkpoint, with the real rendezvous and planner on a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many_nodes import RUN, ManyNodes
from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.databases import Postgres
from tests.in_memory import tmp_path

__all__ = ["tmp_path"]
pytestmark = pytest.mark.cluster

NODES, TENSORS = 24, 200
BYTES_MAX = 6000  # that a node tells PostgreSQL in a save, after the first


def test_many_nodes_save_one_checkpoint(postgres: Postgres, tmp_path: Path) -> None:
    """Three saves of all: each is one sound checkpoint, and a node says little."""
    root = tmp_path / "root"
    root.mkdir()
    many = ManyNodes(postgres.take(), root, NODES, TENSORS)
    try:
        found = [many.save(step) for step in (1, 2, 3)]
    finally:
        many.close()
    assert all(one.bytes <= BYTES_MAX for one in found)
    tier = PosixTier(root)
    assert tier.list(f"{RUN}/{naming.STAGING}") == []
    made = verify(tier, naming.checkpoint_path(RUN, 3))
    assert made.world == NODES
