"""Which weights Paddle holds transposed, by model class."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.foreign.paddle.transposition import linears


@pytest.mark.parametrize(
    ("model", "turned", "kept"),
    [
        ("llama", "self_attn.q_proj mlp.down_proj", "self_attn.kv_b_proj mlp.gate lm_head embed_tokens self_attn.qkv_proj"),
        ("qwen3", "self_attn.o_proj", "mlp.gate self_attn.q_norm"),
        ("qwen2_moe", "mlp.gate mlp.shared_expert_gate mlp.experts.3.up_proj", "lm_head"),
        ("qwen3_moe", "mlp.gate", "mlp.shared_expert_gate"),
        ("ernie4_5", "mlp.up_proj", "mlp.up_gate_proj mlp.gate"),
        ("ernie4_5_moe", "mlp.gate mtp_linear_proj.0 mlp.shared_experts.down_proj", "mtp_linear_proj lm_head"),
        ("glm4_moe", "mlp.experts.0.gate_proj", "mlp.gate"),
        ("gpt_oss", "self_attn.v_proj", "mlp.router"),
        ("deepseek_v3", "self_attn.kv_a_proj_with_mqa self_attn.q_b_proj mlp.gate eh_proj", "self_attn.q_proj"),
        ("gemma3_text", "lm_head self_attn.k_proj", "embed_tokens"),
        ("phi3", "self_attn.qkv_proj mlp.gate_up_proj", "self_attn.q_proj"),
    ],
)
def test_tables(model: str, turned: str, kept: str) -> None:
    """By `model_type`, and by the class where that is missing; adapters and parts of names do not count."""
    for config in ({"model_type": model}, {"architectures": [f"{model.replace('_', '').upper()}ForCausalLM"]}):
        found = linears(config, ())
        for layer in turned.split():
            assert found.has(f"model.layers.0.{layer}.weight")
            assert not found.has(f"model.layers.0.{layer}.lora_A.weight")
            assert not found.has(f"model.layers.0.{layer}.bias")
            assert not found.has(f"model.layers.0.other_{layer.rpartition('.')[2]}.weight")
        for layer in kept.split():
            assert not found.has(f"model.layers.0.{layer}.weight")


def test_without_config() -> None:
    """The plainest models are known by their names; a router, or latent attention, needs the config."""
    dense = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"]
    assert linears(None, dense).has(dense[1])
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.kv_b_proj.weight"):
        with pytest.raises(StateMismatch, match=r"a model without config\.json"):
            linears(None, [*dense, name]).has(dense[1])
