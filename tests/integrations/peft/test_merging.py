"""Adapters merged into their bases as PEFT merges them, in its own arithmetic and in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.daemon.copies_world import copies_world
from tests.wings.merge.adapters.cases import CASES, COMBINATIONS, AdapterCase, CombinationCase
from tests.wings.merge.adapters.make_reference import adapters, combine, merge
from tests.wings.merge.adapters.test_applying import RECIPE, ulps
from tests.wings.merge.adapters.test_combining import combined, recipe
from tests.wings.merge.test_merge_jobs import MergeWorld

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of ties, of embeddings that it saves, and of Conv1D


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MergeWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        yield MergeWorld(made, tmp_path / "place")


def arrays(directory: Path) -> dict[str, NDArray[Any]]:
    return {name: array for file in sorted(directory.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("exact", [True, False], ids=["float64", "own"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind(world: MergeWorld, monkeypatch: pytest.MonkeyPatch, case: AdapterCase, exact: bool) -> None:
    """To a unit in the last place of the result, if PEFT computes in float64; in its own type, of the largest value."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = merge(case, world.place, exact)
    world.merge(RECIPE.replace("tuned", "adapter"))
    found, base, wanted = world.arrays(), arrays(made.base), arrays(made.merged)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        largest = max(float(np.abs(one).max()) for one in (array, base.get(name, array)))
        assert ulps(found[name], array, 0 if exact else largest) <= (1 if exact else 2), name


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: case.name)
def test_every_combination(world: MergeWorld, case: CombinationCase) -> None:
    """The adapter that add_weighted_adapter makes; by svd, its products. PEFT loads ours, and merges it as its own."""
    place = world.place / "peft"
    adapters(place)
    combine(case, place)
    for name in ("one", "two"):
        (place / name).rename(world.place / f"tuned-{name}")
    world.merge(recipe(case.method, case.weights, **case.words))
    ours, theirs = (merged_by_peft(place / "base", adapter) for adapter in (world.path(), place / "combined"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value - theirs[name]).abs().max() <= 2e-6 * theirs[name].abs().max(), name
    if case.method != "svd":
        wanted = arrays(place / "combined")
        assert all(ulps(array, wanted[name]) <= 1 for name, array in combined(world)[0].items())


def test_adapters_of_some_layers(world: MergeWorld) -> None:
    """PEFT loads all products of a combination, also where the first adapter has only some layers."""
    place = world.place / "peft"
    adapters(place)
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    some = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights=False)
    get_peft_model(base, some).save_pretrained(world.place / "tuned-one")
    (place / "two").rename(world.place / "tuned-two")
    world.merge(recipe("cat"))
    ours, plain = merged_by_peft(place / "base", world.path()), load_file(place / "base" / "model.safetensors")
    changed = {name for name, value in ours.items() if name in plain and not np.array_equal(value, plain[name])}
    assert {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qv"} <= changed


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base)
    return dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
