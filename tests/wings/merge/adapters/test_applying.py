"""Adapters of every kind, merged into their bases, against what PEFT 0.21 makes of them (`reference.safetensors`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from holdfast_formats import naming
from holdfast_formats.errors import StateMismatch
from tests.checkpoints import build
from tests.daemon.copies_world import copies_world
from tests.wings.merge.adapters.cases import CASES, AdapterCase
from tests.wings.merge.test_merge_jobs import MergeWorld

Arrays = dict[str, NDArray[Any]]
REFERENCE = Path(__file__).with_name("reference.safetensors")
BITS = {np.dtype(np.float32): 23, np.dtype(np.float16): 10, np.dtype(ml_dtypes.bfloat16): 7}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MergeWorld]:
    with copies_world(tmp_path, replicas=()) as made:
        yield MergeWorld(made, tmp_path / "place")


class Reference:
    """What PEFT wrote: bases, adapters, and the tensors that a merge changed."""

    def __init__(self) -> None:
        with safe_open(REFERENCE, "np") as opened:
            self._configs = opened.metadata()
        self._arrays = load_file(REFERENCE)

    def arrays(self, part: str) -> Arrays:
        return {key.removeprefix(f"{part}/"): one for key, one in self._arrays.items() if key.startswith(f"{part}/")}

    def config(self, part: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self._configs[part])
        return config


PEFT = Reference()


def put(case: AdapterCase, place: Path, **changed: Any) -> None:
    """The directories `base` and `tuned` of a case; `changed` are keys of the adapter's configuration."""
    for name, part, config, file in (
        ("base", f"{case.base}/base", "config.json", "model.safetensors"),
        ("tuned", f"{case.name}/adapter", "adapter_config.json", "adapter_model.safetensors"),
    ):
        (place / name).mkdir(exist_ok=True)
        save_file(PEFT.arrays(part), place / name / file, metadata={"format": "pt"})
        document = PEFT.config(part) | (changed if name == "tuned" else {})
        (place / name / config).write_text(json.dumps(document))


def ulps(found: NDArray[Any], wanted: NDArray[Any], term: float = 0) -> float:
    """The largest difference in units of the last place of the wanted values, or of a larger `term`."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(other), max(term, 2.0**-100)))) - BITS[wanted.dtype])
    return float(np.max(np.abs(one - other) / unit))


RECIPE = "{merge_method: passthrough, models: [{model: ./base+./tuned}]}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_peft_merges_them(world: MergeWorld, case: AdapterCase) -> None:
    """Every changed tensor to a unit in the last place, all others to the bit, and config.json with what changed."""
    put(case, world.place)
    world.merge(RECIPE)
    found, base, wanted = world.arrays(), PEFT.arrays(f"{case.base}/base"), PEFT.arrays(f"{case.name}/merged")
    assert found.keys() == base.keys() | wanted.keys() and wanted
    for name, array in found.items():
        if name not in wanted:
            assert array.tobytes() == base[name].tobytes(), name
        else:
            assert ulps(array, wanted[name]) <= 1, name
    config, theirs = json.loads((world.path() / "config.json").read_text()), PEFT.config(f"{case.name}/merged")
    for key in ("tie_word_embeddings", "vocab_size"):
        assert config.get(key) == theirs.get(key)


def test_a_base_of_another_name(world: MergeWorld) -> None:
    """The report says for which model an adapter was trained, unless the base has this name."""
    for said, noted in (("lab/other-7b", True), ("/models/base", False), (None, False)):
        put(case_named("plain"), world.place, base_model_name_or_path=said)
        notes = world.merge(RECIPE, dry_run=True)["source"]["notes"]
        assert any("./tuned was trained on 'lab/other-7b'" in note for note in notes) is noted


def case_named(name: str) -> AdapterCase:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("plain", {"use_dora": True}, "has no lora_magnitude_vector"),
        ("dora", {"use_dora": False}, "has a lora_magnitude_vector"),
        ("biases of lora_B", {"lora_bias": False}, "lora_bias is not set"),
        ("patterns", {"rank_pattern": {}}, "has rank 4"),
        ("experts", {"target_parameters": ["mlp.experts.up_proj"]}, "no|fit|products"),
        ("experts", {"target_parameters": ["experts.gate_up_proj"]}, "2 products for gate_up_proj"),
        ("plain", {"target_parameters": ["experts.down_proj"]}, "target_parameters names 'experts.down_proj'"),
        ("plain", {"modules_to_save": ["score"]}, "no tensors of modules_to_save: score"),
        ("plain", {"trainable_token_indices": [1]}, "trainable_token_indices"),
        ("some tokens", {"trainable_token_indices": None}, "trainable_token_indices"),
        ("some tokens", {"trainable_token_indices": [1, 2, 3]}, "does not fit trainable_token_indices"),
        ("some tokens", {"trainable_token_indices": [1, 20]}, "does not fit trainable_token_indices"),
        ("some tokens", {"trainable_token_indices": {"wte": [1, 2]}}, "does not fit trainable_token_indices"),
    ],
)
def test_a_configuration_of_other_tensors(world: MergeWorld, name: str, changed: dict[str, Any], said: str) -> None:
    put(case_named(name), world.place, **changed)
    with pytest.raises(StateMismatch, match=said) as refused:
        world.merge(RECIPE)
    assert refused.value.hint


def rewritten(world: MergeWorld, name: str, rename: dict[str, str], leave: str = "") -> None:
    """The case, with other names of some of the adapter's tensors, and without others."""
    put(case_named(name), world.place)
    file = world.place / "tuned" / "adapter_model.safetensors"
    arrays = {key: array for key, array in load_file(file).items() if not leave or leave not in key}
    for old, new in rename.items():
        arrays = {key.replace(old, new): array for key, array in arrays.items()}
    save_file(arrays, file, metadata={"format": "pt"})


def test_both_names_of_a_tied_weight(world: MergeWorld) -> None:
    """PEFT adds both products to the one tensor, which it did not train so."""
    put(case_named("a tied head"), world.place)
    file = world.place / "tuned" / "adapter_model.safetensors"
    arrays, prefix = load_file(file), "base_model.model."
    low, high = (arrays[f"{prefix}lm_head.lora_{part}.weight"] for part in "AB")
    embedding = f"{prefix}model.embed_tokens.lora_embedding_"
    save_file(arrays | {f"{embedding}A": high.T.copy(), f"{embedding}B": low.T.copy()}, file, metadata={"format": "pt"})
    with pytest.raises(StateMismatch, match=r"both change 'model\.embed_tokens\.weight'"):
        world.merge(RECIPE)


def test_more_tokens_without_the_head(world: MergeWorld) -> None:
    """PEFT does not save the head's new rows if the embedding has a product."""
    rewritten(world, "more tokens", {}, leave="lm_head")
    with pytest.raises(StateMismatch, match=r"24 tokens, but no 'lm_head\.weight'"):
        world.merge(RECIPE)


def test_tensors_that_do_not_fit(world: MergeWorld) -> None:
    """Whole tensors of another shape, or of a name that the model lacks or stores in parts."""
    rewritten(world, "norms", {"input_layernorm": "self_attn.o_proj"})
    with pytest.raises(StateMismatch, match=r"o_proj\.weight' has \[8, 8\]"):
        world.merge(RECIPE)
    rewritten(world, "modules", {"lm_head.weight": "score.weight"})
    with pytest.raises(StateMismatch, match=r"'score\.weight', which the model does not have"):
        world.merge(RECIPE)
    put(case_named("experts"), world.place)
    file = world.place / "tuned" / "adapter_model.safetensors"
    down = np.zeros((3, 8, 12), np.float32)
    save_file(load_file(file) | {"base_model.model.model.layers.0.mlp.experts.down_proj": down}, file, {"format": "pt"})
    with pytest.raises(StateMismatch, match="stores in parts"):
        world.merge(RECIPE)


def test_experts_that_are_fused(world: MergeWorld) -> None:
    """A checkpoint with transformers' names in memory: the same values under them."""
    put(case_named("experts"), world.place)
    world.merge(RECIPE)
    apart = world.arrays()
    file = world.place / "base" / "model.safetensors"
    save_file(fused(load_file(file)), file, metadata={"format": "pt"})
    world.merge(RECIPE, 2)
    found, wanted = world.arrays(2), fused(apart)
    assert found.keys() == wanted.keys() and "model.layers.0.mlp.experts.gate_up_proj" in found
    assert all(found[name].tobytes() == array.tobytes() for name, array in wanted.items())


def test_an_adapter_of_single_experts(world: MergeWorld) -> None:
    """Into a checkpoint that has them apart; one that has them fused is refused, and the error says how to part them."""
    put(case_named("experts"), world.place, target_parameters=None)
    prefix, chance = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1", np.random.default_rng(4)
    low, high = chance.standard_normal((4, 8), np.float32), chance.standard_normal((12, 4), np.float32)
    pair = {f"{prefix}.lora_A.weight": low, f"{prefix}.lora_B.weight": high}
    save_file(pair, world.place / "tuned" / "adapter_model.safetensors", metadata={"format": "pt"})
    world.merge(RECIPE)
    file, name = world.place / "base" / "model.safetensors", prefix.removeprefix("base_model.model.") + ".weight"
    base = load_file(file)
    wanted = (base[name] + 1.5 * high.astype(np.float64) @ low.astype(np.float64)).astype(np.float32)
    assert ulps(world.arrays()[name], wanted) <= 1
    save_file(fused(base), file, metadata={"format": "pt"})
    with pytest.raises(StateMismatch, match=r"experts\.1\.w1\.weight', which the model does not have") as refused:
        world.merge(RECIPE, 2)
    assert "--program hf-stacked-mixtral-inverse" in refused.value.hint


def fused(arrays: Arrays) -> Arrays:
    """Mixtral's tensors as transformers 5 holds them."""
    made = {name: array for name, array in arrays.items() if "block_sparse_moe" not in name}
    layer = "model.layers.0.block_sparse_moe"
    experts = [
        {part: arrays[f"{layer}.experts.{number}.{part}.weight"] for part in ("w1", "w2", "w3")} for number in range(3)
    ]
    made["model.layers.0.mlp.gate.weight"] = arrays[f"{layer}.gate.weight"]
    made["model.layers.0.mlp.experts.gate_up_proj"] = np.stack([np.concatenate([one["w1"], one["w3"]]) for one in experts])
    made["model.layers.0.mlp.experts.down_proj"] = np.stack([one["w2"] for one in experts])
    return made


def test_a_base_of_ours_with_a_tie(world: MergeWorld) -> None:
    """Both names of a tied tensor get the product, as of a directory that has one of them."""
    case = case_named("a tied head")
    put(case, world.place)
    world.merge(RECIPE)
    arrays, aliases = PEFT.arrays(f"{case.base}/base"), {"lm_head.weight": "model.embed_tokens.weight"}
    config = json.dumps(PEFT.config(f"{case.base}/base")).encode()
    place = world.root / naming.checkpoint_path("ours", 1)
    build(place, {"model": arrays}, run="ours", step=1, assets={"config.json": config}, aliases={"model": aliases})
    world.merge(RECIPE.replace("./base", "ours@1"), 2)
    found, wanted = world.arrays(2), world.arrays()
    assert found.pop("lm_head.weight").tobytes() == found["model.embed_tokens.weight"].tobytes()
    assert all(found[name].tobytes() == array.tobytes() for name, array in wanted.items()) and len(found) == len(wanted)
