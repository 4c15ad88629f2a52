"""I3, act by act: what is durable when, as the memory tier recorded it."""

from __future__ import annotations

from holdfast_formats import naming
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.storage import MemoryTier
from tests.daemon.writing.test_path import Shards


def test_the_order_of_a_save() -> None:
    """Data, receipt, indexes and state, manifest, COMMIT, directory, rename, both parents; and nothing after that."""
    shards = Shards(1)
    shards.add(TensorSpec("model", "w", "U8", (9,)), bytes(9), [(0, [Box((0,), (9,))])])
    tier = MemoryTier()
    shards.save(tier)
    staging, target = naming.staging_path("r", 7, 1), naming.checkpoint_path("r", 7)
    assert tier.acts == [
        ("file", f"{staging}/model.safetensors"),
        ("file", f"{staging}/receipts/node.json"),
        ("file", f"{staging}/model.safetensors.index.json"),
        ("file", f"{staging}/state.json"),
        ("file", f"{staging}/manifest.json"),
        ("file", f"{staging}/COMMIT"),
        ("directory", staging),
        ("rename", target),
        ("directory", "r/checkpoints"),
        ("directory", "r/staging"),
    ]
