"""The packaged tables against the models and the files of Hugging Face's transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from holdfast_formats.layout.parts import fuse, stack
from holdfast_formats.layout.rules import Fusion, Rules, choose
from holdfast_formats.region import Shape, whole
from tests.local_tensors import fill

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MIXED = {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
ERNIE = {
    "moe_num_experts": 4,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_k": 2,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
NEOX = SMALL | {"num_key_value_heads": None}

# model type, table, what its config has besides
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", SMALL),
    ("llama", "llama", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", "llama", SMALL | {"head_dim": 16}),
    ("ministral", "llama", SMALL | {"head_dim": 16}),
    ("qwen2", "llama", SMALL),
    ("qwen3", "llama", SMALL | {"head_dim": 16, "attention_bias": True}),
    ("seed_oss", "llama", SMALL | {"head_dim": 16}),
    ("smollm3", "smollm3", SMALL),
    ("granite", "llama", SMALL),
    ("phi3", "phi3", SMALL),
    ("gemma", "gemma", SMALL | {"head_dim": 16}),
    ("gemma2", "gemma", SMALL | {"head_dim": 16}),
    ("gemma3_text", "gemma", SMALL | {"head_dim": 16}),
    ("gpt2", "gpt2", GPT2),
    ("gpt2", "gpt2", GPT2 | {"n_inner": 80, "tie_word_embeddings": False}),
    ("gpt_neox", "gpt_neox", NEOX),
    ("mixtral", "mixtral", SMALL | {"num_local_experts": 4}),
    ("qwen2_moe", "qwen_moe", SMALL | MIXED | {"shared_expert_intermediate_size": 40}),
    ("qwen3_moe", "qwen_moe", SMALL | MIXED | {"head_dim": 16}),
    ("deepseek_v2", "deepseek", SMALL | LATENT | {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", "deepseek", SMALL | LATENT | {"q_lora_rank": 16, "attention_bias": True}),
    ("ernie4_5", "ernie", SMALL | {"head_dim": 16, "use_bias": True}),
    ("ernie4_5_moe", "ernie", SMALL | ERNIE | {"use_bias": True}),
]
IDS = [f"{kind}-{i}" for i, (kind, _, _) in enumerate(MODELS)]
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe"}


def _model(kind: str, values: dict[str, Any], device: str) -> Any:
    known = {key: value for key, value in values.items() if value is not None or key == "q_lora_rank"}
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **known))


def _config(model: Any) -> dict[str, Any]:
    """What `save_pretrained` writes into config.json."""
    return json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}


def _shapes(model: Any) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _fused_shape(rules: Rules, fused: Fusion) -> Shape:
    """The shape of a fused tensor out of the shapes that the rules give its parts."""
    parts = []
    for name in fused.of:
        rule = rules.rule(name)
        assert rule is not None and rule.shape is not None, name
        parts.append((name, whole(rule.shape)))
    if not fused.stacked:
        return fuse(fused.name, "F32", parts, fused.dimension, fused.groups).shape
    assert rules.experts
    each = len(parts) // rules.experts
    one = [fuse(fused.name, "F32", parts[i : i + each], fused.dimension, 1) for i in range(0, len(parts), each)]
    return stack(fused.name, one).shape


def _told(rules: Rules, name: str) -> Shape | None:
    rule, fused = rules.rule(name), rules.fusion(name)
    assert (rule is None) != (fused is None), name
    if fused is not None:
        return _fused_shape(rules, fused)
    return None if rule is None else rule.shape


@pytest.mark.parametrize(("kind", "table", "values"), MODELS, ids=IDS)
def test_every_tensor_of_a_model_is_told_of_with_its_shape(kind: str, table: str, values: dict[str, Any]) -> None:
    """Each name of a state has a rule or is a fused tensor of such, and the shapes from config.json are the real ones."""
    model = _model(kind, values, "meta")
    shapes = _shapes(model)
    rules = choose(_config(model), shapes)
    assert rules.name == table
    assert rules.layers == model.config.num_hidden_layers
    assert {name: _told(rules, name) for name in shapes} == shapes


@pytest.mark.parametrize(("kind", "table", "values"), MODELS, ids=IDS)
def test_ties_are_the_models(kind: str, table: str, values: dict[str, Any]) -> None:
    """What a model ties, and only that, is an alias: of a config as it is and of one that leaves the usual out."""
    model = _model(kind, values, "meta")
    held = [name for name in _shapes(model) if name not in model.all_tied_weights_keys]
    tied = dict(model.all_tied_weights_keys)
    assert bool(tied) == model.config.tie_word_embeddings
    config = _config(model)
    assert choose(config, held, table=table).aliases() == tied
    if model.config.tie_word_embeddings == type(model.config)().tie_word_embeddings:
        assert choose({k: v for k, v in config.items() if k != "tie_word_embeddings"}, held).aliases() == tied


@pytest.mark.parametrize(("kind", "table", "values"), MODELS, ids=IDS)
def test_what_transformers_writes_is_told_of_too(kind: str, table: str, values: dict[str, Any], tmp_path: Path) -> None:
    """The files of `save_pretrained`, whose names may not be the state's, have rules and shapes, and choose their table.

    What a name on disk and one in memory have in common are the parts, or a synonym.
    """
    model = _model(kind, values, "cpu")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in written}
    rules = choose(json.loads((tmp_path / "config.json").read_bytes()), written)
    assert {name: _told(rules, name) for name in written} == written
    assert choose(None, written).name == ("llama" if kind in {"smollm3", "ernie4_5", "gemma"} else table)  # Llama's names
    for name, tensor in model.state_dict().items():
        if name in written or name in rules.aliases():
            continue
        fused = rules.fusion(name)
        if fused is None:
            assert [other for other in rules.synonyms(name) if other in written], name
        else:
            np.testing.assert_array_equal(_stacked(rules, fused, tensors), tensor.numpy())
    assert any(".experts.0." in name for name in written) == (kind in MIXTURES)


def _stacked(rules: Rules, fused: Fusion, tensors: dict[str, Any]) -> Any:
    assert rules.experts
    each = len(fused.of) // rules.experts
    boxes = [(name, whole(tensors[name].shape)) for name in fused.of]
    one = [fuse(fused.name, "F32", boxes[i : i + each], fused.dimension, 1) for i in range(0, len(boxes), each)]
    return fill(stack(fused.name, one), tensors)


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "gpt_neox"])
def test_the_parts_of_a_stored_fused_tensor_are_queries_keys_and_values(kind: str) -> None:
    """A layer whose fused tensor is put together of parts by the rules computes what separate projections compute.

    The parts are told apart by filling them with 1, 2 and 3: each of the three outputs of the attention must see one value.
    """
    _, _, values = next(model for model in MODELS if model[0] == kind)
    model = _model(kind, values, "cpu")
    rules = choose(_config(model), _shapes(model))
    fused = next(f for f in map(rules.fusion, _shapes(model)) if f is not None and f.kind == "qkv")
    parts = [(name, whole(rule.shape)) for name in fused.of if (rule := rules.rule(name)) is not None and rule.shape]
    filled = {name: np.full(box.shape, value, np.float32) for value, (name, box) in enumerate(parts, 1)}
    weight = fill(fuse(fused.name, "F32", parts, fused.dimension, fused.groups), filled)
    row = torch.from_numpy(weight if fused.dimension == 0 else weight.T)[:, 0]
    for value, part in zip((1, 2, 3), _apart(kind, row, model.config), strict=True):
        assert set(part.flatten().tolist()) == {value}


def _apart(kind: str, row: torch.Tensor, config: Any) -> tuple[torch.Tensor, ...]:
    """Query, key and value out of a fused projection's output, as each model's attention takes them."""
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if kind == "gpt_neox":
        return row.view(heads, 3 * size).chunk(3, dim=-1)
    if kind == "gpt2":
        return row.split(config.hidden_size)
    return row.split([heads * size, config.num_key_value_heads * size, config.num_key_value_heads * size])


def test_a_config_of_gemma_3_that_leaves_the_usual_out() -> None:
    """Published configs state what differs from the defaults; the table has the defaults."""
    usual = transformers.Gemma3TextConfig()
    with torch.device("meta"):
        shapes = _shapes(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(num_hidden_layers=1)))
    said = {"hidden_size": usual.hidden_size, "intermediate_size": usual.intermediate_size, "num_hidden_layers": 1}
    rules = choose({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **said}}, shapes)
    assert {name: _told(rules, name) for name in shapes} == shapes


def test_a_model_with_a_vision_tower_is_known_by_half() -> None:
    """Of a model of several parts the text model has rules with its own sizes; the others' tensors have none."""
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=SMALL | {"head_dim": 16},
        vision_config=tower | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    shapes = _shapes(model)
    rules = choose(_config(model), shapes)
    known = {name for name in shapes if rules.rule(name) is not None}
    assert {name: _told(rules, name) for name in known} == {name: shapes[name] for name in known}
    assert known == {name for name in shapes if "language_model." in name or name == "lm_head.weight"}
    assert len(known) < len(shapes)
