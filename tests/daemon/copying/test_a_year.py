"""A year of a run on one disk: of 500 checkpoints all but the newest few are thinned, and every model still loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from holdfast_formats import naming
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import PosixTier, stored_in
from tests.checkpoints import build
from tests.control.published import mark_verified
from tests.databases import sqlite_url
from tests.in_memory import tmp_path

__all__ = ["tmp_path"]
RUN, LOADED_EVERY = "year", 50
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def weights(shapes: Mapping[str, tuple[int, ...]], step: int) -> dict[str, np.ndarray]:
    """The model of a step: other values at each."""
    chance = np.random.default_rng(step)
    return {name: chance.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


@pytest.fixture
def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in AutoModelForCausalLM.from_config(CONFIG).state_dict().items()}


@pytest.fixture(params=[70, pytest.param(500, marks=pytest.mark.e2e)])
def count(request: pytest.FixtureRequest) -> int:
    """How many checkpoints; a year's many in the long lane alone."""
    return int(request.param)


@pytest.fixture
def control(tmp_path: Path, shapes: dict[str, tuple[int, ...]], count: int) -> Iterator[Control]:
    """A root with the checkpoints of a run in mixed precision, all of them verified, and its catalog."""
    config = CONFIG.to_json_string().encode()
    for step in range(count):
        model = weights(shapes, step)
        whole = {name: value.astype(np.float32) for name, value in model.items()}
        moments = {f"{name}/{key}": value for name, value in whole.items() for key in ("exp_avg", "exp_avg_sq")}
        arrays = {"model": model, "master": whole, "optim": moments, "extra": {}}
        path = tmp_path / "root" / naming.checkpoint_path(RUN, step)
        assets = {"config.json": config}
        build(path, arrays, run=RUN, step=step, file_bytes_max=10**9, extent_bytes=2**18, assets=assets)
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    made = Control(stored_in(PosixTier(tmp_path / "root")), catalog, None)
    made.recovery.recover()
    for step in range(count):
        mark_verified(catalog, RUN, step)
    yield made
    made.close()
    catalog.close()


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_year_fits(tmp_path: Path, control: Control, shapes: dict[str, tuple[int, ...]], count: int) -> None:
    """It takes less than 0.3 of the room, on the disk and by the catalog; all weights are bit-equal."""
    root = tmp_path / "root" / RUN
    before = size(root)
    control.rotation.set_policy(RUN, RetentionPolicy(keep_full=3), "*")
    assert control.rotation.wait_until_applied()
    thinner = Thinner(control.store, control.thinning)
    assert thinner.run_once(RUN) == list(range(count - 3))
    assert size(root) <= 0.3 * before
    for step in range(count):
        directory = tmp_path / "root" / naming.checkpoint_path(RUN, step)
        expected = {name: torch.from_numpy(v.view(np.int16)) for name, v in weights(shapes, step).items()}
        if step % LOADED_EVERY:
            loaded = load_file(directory / "model.safetensors")
        else:
            loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name].view(torch.int16), value) for name, value in expected.items()), step
