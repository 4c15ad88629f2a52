"""What Paddle wrote is imported as a checkpoint: every group, bit for bit, and an adapter with what PEFT needs beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.progress import Quiet
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.import_jobs import Importer
from tests.daemon.copies_world import CopiesWorld, copies
from tests.job_requests import an_import
from tests.wings.convert.foreign.paddle import written

world = copies(replicas=())


def _imported(world: CopiesWorld, name: str) -> Path:
    source = PosixTier(written.GOLDEN / name / "checkpoint-2")
    Importer(world.control).bring(source, an_import("mine", 2), Quiet())
    verify(world.tier, naming.checkpoint_path("mine", 2))
    return world.root / naming.checkpoint_path("mine", 2)


@pytest.mark.parametrize("name", ["uc_tp2_async", "uc_tp2_ignore_merge", "flex_sd2v2", "sharding_io_sd2v2"])
def test_a_training(world: CopiesWorld, name: str) -> None:
    """Weights in bfloat16, masters and moments, whatever the kind of checkpoint."""
    place = _imported(world, name)
    moments = {key: value for file in place.glob("optim*.safetensors") for key, value in load_file(file).items()}
    masters = {key: value for file in place.glob("master*.safetensors") for key, value in load_file(file).items()}
    assert len(masters) == 21
    for key, found in masters.items():
        stored = found.T if written.is_linear(key) else found
        np.testing.assert_array_equal(stored, written.master(key, stored.shape))
        first = moments[f"{key}/exp_avg"]
        np.testing.assert_array_equal(first.T if written.is_linear(key) else first, written.moment(key, 1, stored.shape))
        assert moments[f"{key}/step"] == 2


def test_an_adapter(world: CopiesWorld) -> None:
    """With adapter_config.json, which is made of Paddle's lora_config.json."""
    place = _imported(world, "lora")
    assert json.loads((place / "adapter_config.json").read_text())["r"] == 4
    assert (place / "lora_config.json").exists()
