"""Adapters combined into one, against what PEFT's `add_weighted_adapter` makes of them (`reference.safetensors`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_service.wings.merge.adapters import combining
from tests.wings.merge.adapters.cases import COMBINATIONS, CombinationCase
from tests.wings.merge.adapters.test_applying import PEFT, Arrays, ulps, world
from tests.wings.merge.test_merge_jobs import MergeWorld

__all__ = ["world"]
NAMES = {"svd_rank": "rank", "density": "density", "majority_sign_method": "majority_sign_method"}


def put(place: Path, name: str, arrays: Arrays | None = None, **changed: Any) -> None:
    """An adapter of the reference as PEFT saved it; `changed` are keys of its configuration."""
    directory = place / f"tuned-{name}"
    directory.mkdir(exist_ok=True)
    held = PEFT.arrays(name) if arrays is None else arrays
    save_file(held, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(PEFT.config(name) | changed))


def recipe(method: str, weights: tuple[float, ...] = (0.7, -0.4), **words: Any) -> str:
    named = zip(("one", "two"), weights, strict=False)
    models = [{"model": f"./tuned-{name}", "parameters": {"weight": weight}} for name, weight in named]
    parameters = {NAMES[name]: value for name, value in words.items()}
    document = {"merge_method": method, "dialect": "peft", "group": "adapter"}
    document |= {"out_group": "adapter_model", "models": models, "parameters": parameters}
    return json.dumps(document)


def combined(world: MergeWorld, step: int = 1) -> tuple[Arrays, dict[str, Any]]:
    path = world.root / naming.checkpoint_path("merged", step)
    arrays = {name: array for file in path.glob("adapter_model*.safetensors") for name, array in load_file(file).items()}
    return arrays, json.loads((path / "adapter_config.json").read_text())


def products(arrays: Arrays) -> dict[str, NDArray[np.float64]]:
    """B·A of each module."""
    ends = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
    return {
        name.removesuffix(end): arrays[name.removesuffix(end) + other].astype(np.float64) @ array.astype(np.float64)
        for name, array in arrays.items()
        for end, other in ends.items()
        if name.endswith(end)
    }


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: case.name)
def test_as_peft_combines_them(world: MergeWorld, case: CombinationCase) -> None:
    """A and B to the bit, or a unit in the last place; with svd, whose signs are anyone's choice, their product."""
    for name in ("one", "two"):
        put(world.place, name)
    world.merge(recipe(case.method, case.weights, **case.words))
    (found, config), wanted, theirs = combined(world), PEFT.arrays(case.name), PEFT.config(case.name)
    assert found.keys() == wanted.keys()
    if case.method == "svd":
        ours = products(found)
        for name, array in products(wanted).items():
            assert np.abs(ours[name] - array).max() <= 1e-6 * np.abs(array).max(), name
    else:
        assert all(ulps(array, wanted[name]) <= 1 for name, array in found.items())
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"):
        assert config[key] == theirs[key]
    assert set(config["target_modules"]) == set(theirs["target_modules"])


def test_the_sum_of_products(world: MergeWorld) -> None:
    """cat has it exactly, with adapters of other ranks and scales too, and the result can be merged into a base."""
    first, second = PEFT.arrays("one"), PEFT.arrays("two")
    put(world.place, "one", rank_pattern={"up_proj": 4, "nothing": 7}, use_rslora=True)
    put(world.place, "two")
    world.merge(recipe("cat"))
    found, config = combined(world)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (11, 11, False)
    ours, ones, twos = products(found), products(first), products(second)
    for name, array in ours.items():
        wanted = 0.7 * 6 / 2 * ones.get(name, np.float64(0)) - 0.4 * 9 / 4 * twos.get(name, np.float64(0))
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "chosen", [{"target_modules": ".*proj"}, {"layers_to_transform": [0]}, {"exclude_modules": ["layers.1.mlp.up_proj"]}]
)
def test_other_choices_of_modules(world: MergeWorld, chosen: dict[str, Any]) -> None:
    """The result names every module that has a product, and no layers: PEFT would not load the others."""
    put(world.place, "one", **chosen)
    put(world.place, "two")
    world.merge(recipe("cat"))
    found, config = combined(world)
    assert set(config["target_modules"]) == {name.removeprefix("base_model.model.") for name in products(found)}
    assert not any(config[key] for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))


def test_adapters_that_cannot_be_combined(world: MergeWorld) -> None:
    """By the adapter's name and what it has; the way on is another method, or each by itself."""
    one, prefix = PEFT.arrays("one"), "base_model.model."
    put(world.place, "two")
    put(world.place, "one", one | {f"{prefix}lm_head.weight": np.ones((3, 3), np.float32)})
    with pytest.raises(StateMismatch, match=r"\./tuned-one cannot be combined .*lm_head\.weight") as refused:
        world.merge(recipe("linear"))
    assert "MODEL+ADAPTER" in refused.value.hint
    put(world.place, "one", use_dora=True)
    with pytest.raises(StateMismatch, match="use_dora"):
        world.merge(recipe("cat"))
    put(world.place, "one", r=5)
    with pytest.raises(StateMismatch, match="has rank 5"):
        world.merge(recipe("cat"))
    half = {name: array[:2] if "_A" in name else np.ascontiguousarray(array[:, :2]) for name, array in one.items()}
    put(world.place, "one", half, r=2)
    with pytest.raises(StateMismatch, match=r"adapters of one rank; \./tuned-one has 2, and \./tuned-two 4") as refused:
        world.merge(recipe("linear"))
    assert "svd" in refused.value.hint
    world.merge(recipe("svd"))
    assert combined(world)[1]["r"] == 4
    short = {name: array[:, :3].copy() if "_A" in name else array for name, array in one.items()}
    put(world.place, "one", short)
    with pytest.raises(StateMismatch, match="in one adapter"):
        world.merge(recipe("cat"), 2)


def test_recipes_that_are_refused(world: MergeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        put(world.place, name)
    with pytest.raises(InvalidRequest, match="combines adapters"):
        world.merge(recipe("cat").replace('"peft"', '"mergekit"'))
    with pytest.raises(InvalidRequest, match="not a method"):
        world.merge(recipe("slerp"))
    with pytest.raises(InvalidRequest, match="no density"):
        world.merge(recipe("ties"))
    with pytest.raises(InvalidRequest, match=r"line 1: .*'ties_svd', which prunes whole products") as refused:
        world.merge(recipe("ties_svd"))
    assert "`ties`" in refused.value.hint
    with pytest.raises(InvalidRequest, match="density 0 would divide"):
        world.merge(recipe("dare_linear", density=0))
    with pytest.raises(InvalidRequest, match=r"rank 2\.5"):
        world.merge(recipe("svd", svd_rank=2.5))
    models = recipe("linear").replace("adapter_model", "model").replace('"adapter"', '"model"')
    models = models.replace("./tuned-one", "one@1").replace("./tuned-two", "two@1")
    with pytest.raises(InvalidRequest, match="the dialect peft combines adapters"):
        world.merge(models)
    monkeypatch.setattr(combining, "MODULE_BYTES_MAX", 64)
    with pytest.raises(LimitExceeded, match="bytes together"):
        world.merge(recipe("cat"))
