"""The programs that come with Holdfast: what they make computes, in each system's own way, the logits of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import compile_program, find, fitting, inverted, load, packaged, read_program
from holdfast_formats.programs.choice import written
from holdfast_formats.programs.statements import parse_statements
from holdfast_formats.tensors import TensorSpec
from tests.formats.layout.rules.test_transformers import ERNIE, LATENT, SMALL
from tests.formats.programs.arrays import Arrays, applied, key, same, specs
from tests.formats.programs.reference_models import (
    Megatron,
    Paddle,
    PaddleDeepseek,
    PaddleErnieMoe,
    System,
    Titan,
    logits,
)

TINY = SMALL | {"num_hidden_layers": 2, "tie_word_embeddings": False}
MIXED = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
ALL_EXPERTS = MIXED | {"decoder_sparse_step": 1}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
NEXT = {"shared_expert_intermediate_size": 40, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY | {"attention_bias": False},
    "mistral": TINY | {"head_dim": 16, "sliding_window": None},
    "qwen2": TINY,
    "qwen3": TINY | {"head_dim": 16, "attention_bias": False},
    "ernie4_5": TINY | {"head_dim": 8},
    "qwen2_moe": TINY | ALL_EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": TINY | ALL_EXPERTS | {"head_dim": 16},
    "mixtral": TINY | {"num_local_experts": 4},
    "minimax": TINY | {"num_local_experts": 4, "head_dim": 8},
    "phimoe": TINY | {"num_local_experts": 4},
    "deepseek_v2": TINY | LATENT | {"q_lora_rank": 16},
    "deepseek_v3": TINY | LATENT | {"q_lora_rank": 16},
    "glm4_moe": TINY | ROUTED,
    "glm4_moe_lite": TINY | LATENT | {"q_lora_rank": 16},
    "dots1": TINY | ROUTED | {"n_shared_experts": 1},
    "olmoe": TINY | OLMOE,
    "flex_olmo": TINY | OLMOE,
    "hunyuan_v1_moe": TINY | {"num_experts": 4, "moe_topk": 2, "head_dim": 8, "attention_head_dim": 8},
    "qwen3_next": TINY | ALL_EXPERTS | NEXT,
    "ernie4_5_moe": TINY | ERNIE,
}


class Model(NamedTuple):
    """A small random model of transformers, and the tensors of its directory."""

    module: Any
    arrays: Arrays
    config: dict[str, Any]
    tokens: torch.Tensor
    logits: torch.Tensor


@cache
def _saved(kind: str, folder: Path, **more: Any) -> Model:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **(CONFIGS[kind] | more))
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.3 + ("norm" in name))
    module.save_pretrained(folder / kind)
    arrays = {key(name): values for name, values in load_file(folder / kind / "model.safetensors").items()}
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 7))
    with torch.no_grad():
        return Model(module, arrays, json.loads(config.to_json_string()), tokens, module(tokens).logits)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


PAIRS = [(name, kind) for name in packaged() for kind in load(name).model_types]


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=[f"{name}-{kind}" for name, kind in PAIRS])
def test_a_model_comes_back_as_it_was(name: str, kind: str, folder: Path) -> None:
    """The program, then its inverse: every tensor is as transformers saved it, with its masters and optimizer state."""
    model = _saved(kind, folder)
    start = dict(model.arrays)
    for each, values in model.arrays.items():
        start[key(each.name, "master")] = values * 2
        start[key(f"{each.name}/exp_avg", "optim")] = values * 3
        start[key(f"{each.name}/step", "optim")] = np.float32(7).reshape(())
    program = load(name)
    compiled = compile_program(program, specs(start), model.config)
    assert not compiled.lost and not compiled.casts and not compiled.zeros
    made = applied(compiled, start)
    assert find(program.source, program.target, model.config).name == name
    back = find(program.target, program.source, model.config)
    same(applied(compile_program(back, specs(made), model.config), made), start)


Build = Callable[[dict[str, torch.Tensor], Any], System]
SYSTEMS: list[tuple[str, Build, list[str]]] = [
    (
        "paddle",
        lambda w, c: Paddle(w, c, fused=False),
        ["llama", "mistral", "qwen2", "qwen3", "ernie4_5", "qwen2_moe", "qwen3_moe"],
    ),
    ("paddle", lambda w, c: PaddleErnieMoe(w, c, fused=False), ["ernie4_5_moe"]),
    ("paddle-fused", lambda w, c: PaddleErnieMoe(w, c, fused=True), ["ernie4_5_moe"]),
    ("paddle", lambda w, c: PaddleDeepseek(w, c, fused=False), ["deepseek_v3"]),
    ("paddle-fused", lambda w, c: Paddle(w, c, fused=True), ["qwen2", "qwen3", "ernie4_5", "qwen2_moe", "qwen3_moe"]),
    (
        "megatron",
        lambda w, c: Megatron(w, c, stacked=False),
        ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"],
    ),
    ("megatron-stacked", lambda w, c: Megatron(w, c, stacked=True), ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]),
    ("titan", lambda w, c: Titan(w, c, legacy=False), ["llama", "qwen3", "qwen3_moe"]),
    ("titan-legacy", lambda w, c: Titan(w, c, legacy=True), ["llama"]),
]
FORWARD = [(system, build, kind) for system, build, kinds in SYSTEMS for kind in kinds]


@pytest.mark.parametrize(("system", "build", "kind"), FORWARD, ids=[f"{system}-{kind}" for system, _, kind in FORWARD])
def test_the_logits_are_those_of_transformers(system: str, build: Build, kind: str, folder: Path) -> None:
    """A forward pass as the other system does it, with what the program made, gives the same logits."""
    model = _saved(kind, folder)
    made = applied(compile_program(find("hf", system, model.config), specs(model.arrays), model.config), model.arrays)
    weights = {each.name: torch.from_numpy(values) for each, values in made.items()}
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    with torch.no_grad():
        found = logits(build(weights, model.module.config), model.module.config, model.tokens)
    torch.testing.assert_close(found, model.logits, rtol=1e-5, atol=1e-5)
    assert model.logits.abs().max() > 0.1


STACKED = [kind for name in packaged() if load(name).target == "hf-stacked" for kind in load(name).model_types]


@pytest.mark.parametrize("kind", STACKED)
def test_stacked_experts_are_those_that_transformers_holds(kind: str, folder: Path) -> None:
    """Every tensor of a checkpoint gets the name and the values that transformers itself gives it when it loads."""
    model = _saved(kind, folder)
    made = applied(compile_program(find("hf", "hf-stacked", model.config), specs(model.arrays), model.config), model.arrays)
    held = model.module.state_dict()
    assert {each.name for each in made} == held.keys() != {each.name for each in model.arrays}
    for each, values in made.items():
        np.testing.assert_array_equal(values, held[each.name].numpy())


@pytest.mark.parametrize("kind", STACKED)
def test_the_program_for_experts_is_found(kind: str, folder: Path) -> None:
    """By the names that are there and those that are wanted, in both directions, with config.json and without."""
    model = _saved(kind, folder)
    apart, held = specs(model.arrays), model.module.state_dict()
    fused = {key(name): TensorSpec("model", name, "F32", tuple(value.shape)) for name, value in held.items()}
    for config in (model.config, None):
        there, back = fitting(apart, held, config), fitting(fused, {each.name for each in apart}, config)
        assert there is not None and there.target == "hf-stacked"
        assert back is not None and back.target == "hf"
    assert fitting(apart, ["another.weight"], model.config) is None


TURNED = {
    "deepseek_v3": "kv_a_proj_with_mqa kv_b_proj q_a_proj q_b_proj o_proj gate_proj up_proj down_proj gate",
    "ernie4_5_moe": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj gate",
    "qwen2_moe": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj gate shared_expert_gate",
}


@pytest.mark.parametrize("kind", sorted(TURNED))
def test_paddle_turns_these_weights_and_no_others(kind: str, folder: Path) -> None:
    """The weights that PaddleFormers transposes for this model are, all others are as they were."""
    model = _saved(kind, folder)
    made = applied(compile_program(find("hf", "paddle", model.config), specs(model.arrays), model.config), model.arrays)
    assert made.keys() == model.arrays.keys()
    turned = 0
    for each, values in made.items():
        word = each.name.removesuffix(".weight").rpartition(".")[2]
        wanted = model.arrays[each].T if word in TURNED[kind].split() else model.arrays[each]
        turned += word in TURNED[kind].split()
        np.testing.assert_array_equal(values, wanted)
    assert turned > 10


def test_a_padded_vocabulary_is_cut(folder: Path) -> None:
    """Megatron's rows beyond the vocabulary are zeros on the way there, and named as lost on the way back."""
    model = _saved("llama", folder)
    config = model.config | {"padded_vocab_size": 128}
    made = applied(compile_program(find("hf", "megatron", config), specs(model.arrays), config), model.arrays)
    embedding = made[key("embedding.word_embeddings.weight")]
    assert embedding.shape == (128, 32) and not embedding[96:].any()
    back = compile_program(find("megatron", "hf", config), specs(made), model.config)
    assert {(lost.key.name, lost.elements) for lost in back.lost} == {
        ("embedding.word_embeddings.weight", 32 * 32),
        ("output_layer.weight", 32 * 32),
    }
    same(applied(back, made), model.arrays)


def test_a_program_that_does_not_exist_is_refused() -> None:
    """The error says which layouts there are for the model."""
    with pytest.raises(InvalidRequest, match="no program converts hf to paddle-fused for the model type 'llama'") as caught:
        find("hf", "paddle-fused", {"model_type": "llama"})
    assert "hf and megatron" in caught.value.hint
    with pytest.raises(InvalidRequest, match="has no model_type"):
        find("hf", "paddle", {})
    with pytest.raises(InvalidRequest, match="there is no program 'x'"):
        load("x")
    with pytest.raises(InvalidRequest, match="'auto' chooses a program by the tensors of a live state"):
        load("auto")
    assert 'name = "hf-titan"' in written("hf-titan")
    assert load("hf-titan-inverse").statements == inverted(load("hf-titan")).statements


GUIDE = Path(__file__).parents[3] / "docs" / "programs.md"


def test_the_guide_lists_every_program() -> None:
    """Layout, name and model types, as the files say them."""
    rows = re.findall(r"^\| `([a-z-]+)` \| `([a-z0-9-]+)` \| (.+) \|$", GUIDE.read_text("utf-8"), re.MULTILINE)
    said = {name: (target, types.split(", ")) for target, name, types in rows}
    assert said == {name: (load(name).target, list(load(name).model_types)) for name in packaged()}


def test_every_statement_of_the_guide_is_read() -> None:
    """The example program, and each form in the table of statements."""
    text = GUIDE.read_text("utf-8")
    (example,) = re.findall(r'```toml\n(name = "mine".*?)```', text, re.DOTALL)
    assert len(read_program(example).statements) == 5
    table = text[text.index("## What statements do") : text.index("## What follows a weight")]
    forms = [form for row in table.splitlines() for form in re.findall(r"`([^`]*->[^`]*)`", row)]
    assert len(forms) > 20
    for form in forms:
        assert len(parse_statements(form, ["vocab"])) == 1, form


@pytest.mark.parametrize(
    "name", ["../hf-paddle", "hf-paddle-inverse-inverse", "hf-paddle" + "-inverse" * 5000, "-inverse", ""]
)
def test_names_of_no_program(name: str) -> None:
    """Whatever a request has for a name is looked up in the list of programs, and nothing else happens."""
    with pytest.raises(InvalidRequest, match="there is no program"):
        load(name)
