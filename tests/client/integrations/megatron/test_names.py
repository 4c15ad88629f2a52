"""Megatron's tensors under Hugging Face's names: which rows of which tensor each row becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.integrations.megatron.names import HuggingFaceNames
from holdfast.integrations.megatron.pieces import ModelTensors, ParameterPiece, Stored
from holdfast_formats.errors import InvalidRequest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
LAYER = "decoder.layers.7."


def renamed(name: str, shape: tuple[int, ...], parts: int = 1, **config: Any) -> dict[str, torch.Tensor]:
    """The stored tensors that as many ranks make of a tensor of Megatron's whose elements are counted."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found: dict[str, torch.Tensor] = {}
    rows = shape[0] // parts
    for part in range(parts):
        local = whole[part * rows : (part + 1) * rows].clone()
        piece = ParameterPiece(name, shape, (part * rows, *(0 for _ in shape[1:])), tuple(local.shape), 0)
        stored = Stored(local, name, (piece,))
        for new in HuggingFaceNames({**CONFIG, **config}).renamed(ModelTensors((stored,), {})).tensors[0].pieces:
            into = found.setdefault(new.name, torch.full(new.shape, -1.0))
            fragment = new.of(local)
            into[fragment.boxes[0].slices] = fragment.tensor
    assert not any((tensor == -1).any() for tensor in found.values()), "a row is missing"
    return found


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_queries_keys_and_values_are_taken_apart_by_group(parts: int) -> None:
    """As Megatron computes it: of each key-value head its queries, its key, its value; also where ranks cut a group."""
    whole = torch.arange(64.0).reshape(2, 8, 4)  # groups, rows of a group, hidden
    found = renamed(f"{LAYER}self_attention.linear_qkv.weight", (16, 4), parts)
    prefix = "model.layers.7.self_attn."
    assert found[f"{prefix}q_proj.weight"].equal(whole[:, :4].reshape(8, 4))
    assert found[f"{prefix}k_proj.weight"].equal(whole[:, 4:6].reshape(4, 4))
    assert found[f"{prefix}v_proj.weight"].equal(whole[:, 6:].reshape(4, 4))


def test_biases_are_taken_apart_as_well() -> None:
    found = renamed(f"{LAYER}self_attention.linear_qkv.bias", (16,), 2)
    assert found["model.layers.7.self_attn.k_proj.bias"].tolist() == [4, 5, 12, 13]


@pytest.mark.parametrize("parts", [1, 3])
def test_gate_and_up_are_halves(parts: int) -> None:
    found = renamed(f"{LAYER}mlp.linear_fc1.weight", (6, 2), parts)
    assert found["model.layers.7.mlp.gate_proj.weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert found["model.layers.7.mlp.up_proj.weight"].tolist() == [[6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("embedding.word_embeddings.weight", (10, 4), "model.embed_tokens.weight"),
        ("output_layer.weight", (10, 4), "lm_head.weight"),
        ("decoder.final_layernorm.weight", (4,), "model.norm.weight"),
        (f"{LAYER}input_layernorm.weight", (4,), "model.layers.7.input_layernorm.weight"),
        (f"{LAYER}self_attention.linear_qkv.layer_norm_weight", (4,), "model.layers.7.input_layernorm.weight"),
        (f"{LAYER}self_attention.q_layernorm.weight", (2,), "model.layers.7.self_attn.q_norm.weight"),
        (f"{LAYER}self_attention.linear_proj.weight", (4, 8), "model.layers.7.self_attn.o_proj.weight"),
        (f"{LAYER}mlp.linear_fc1.layer_norm_weight", (4,), "model.layers.7.post_attention_layernorm.weight"),
        (f"{LAYER}mlp.linear_fc2.weight", (4, 6), "model.layers.7.mlp.down_proj.weight"),
    ],
)
def test_the_others_have_another_name(name: str, shape: tuple[int, ...], stored: str) -> None:
    assert renamed(name, shape) == {stored: pytest.approx(torch.arange(float(torch.Size(shape).numel())).reshape(shape))}


@pytest.mark.parametrize(
    ("name", "shape", "config", "text"),
    [
        (f"{LAYER}mlp.router.weight", (4, 4), {}, "has no name for"),
        ("embedding.word_embeddings.weight", (12, 4), {}, "vocab_size"),
        (f"{LAYER}self_attention.linear_qkv.weight", (18, 4), {}, "4 heads"),
        (f"{LAYER}self_attention.linear_qkv.weight", (20, 4), {"num_key_value_heads": 3}, "4 heads"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, shape: tuple[int, ...], config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        renamed(name, shape, **config)
    assert name in refused.value.detail


@pytest.mark.parametrize(("config", "text"), [({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"), (7, "int")])
def test_other_architectures_are_refused(config: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        HuggingFaceNames(config)
