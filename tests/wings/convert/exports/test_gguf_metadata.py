"""config.json as GGUF's metadata, and what is refused because llama.cpp would compute something else."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.errors import CheckpointError, NoSuchResource, StateMismatch
from holdfast_service.wings.convert.exports import gguf_metadata
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 12,
    "rms_norm_eps": 1e-5,
}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_a_llama() -> None:
    shape = gguf_metadata.read({**CONFIG, "rope_theta": 5e5, "hidden_act": "silu"})
    assert shape.metadata == {
        "general.architecture": "llama",
        "general.type": "model",
        "llama.context_length": Unsigned(32),
        "llama.embedding_length": Unsigned(8),
        "llama.feed_forward_length": Unsigned(24),
        "llama.block_count": Unsigned(2),
        "llama.attention.head_count": Unsigned(4),
        "llama.vocab_size": Unsigned(12),
        "llama.attention.head_count_kv": Unsigned(2),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": Unsigned(2),
    }
    assert (shape.heads, shape.key_heads, shape.head_size, shape.layers) == (4, 2, 2, 2)
    assert not shape.rope_factors and not shape.left_out


@pytest.mark.parametrize("held", ["rope_scaling", "rope_parameters"])
def test_the_rotation_of_llama_3(held: str) -> None:
    """Short waves stay, long ones are stretched by the factor, and those between are blended."""
    scaling = {**SCALED, "rope_type": "llama3", "rope_theta": 5e5}
    shape = gguf_metadata.read({**CONFIG, "head_dim": 128, "rope_theta": 5e5, held: scaling})
    assert len(shape.rope_factors) == 64
    assert shape.rope_factors[0] == 1.0 and shape.rope_factors[-1] == 8.0
    assert list(shape.rope_factors) == sorted(shape.rope_factors)
    assert any(1 < factor < 8 for factor in shape.rope_factors)
    assert shape.metadata["llama.attention.key_length"] == Unsigned(128)


def test_stretched_rotations() -> None:
    shape = gguf_metadata.read(
        {
            **CONFIG,
            "model_type": "qwen2",
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 9},
        }
    )
    assert shape.metadata["qwen2.rope.scaling.type"] == "yarn"
    assert shape.metadata["qwen2.rope.scaling.factor"] == 4.0
    assert shape.metadata["qwen2.rope.scaling.original_context_length"] == Unsigned(9)


def test_gemma_2() -> None:
    shape = gguf_metadata.read({**CONFIG, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256})
    assert shape.metadata["gemma2.attn_logit_softcapping"] == 50.0
    assert shape.metadata["gemma2.attention.sliding_window"] == Unsigned(4096)
    assert shape.metadata["gemma2.attention.value_length"] == Unsigned(256)


def test_a_window_is_left_out() -> None:
    (left,) = gguf_metadata.read({**CONFIG, "model_type": "mistral", "sliding_window": 16}).left_out
    assert "sliding_window" in left.what
    assert not gguf_metadata.read({**CONFIG, "model_type": "qwen2", "sliding_window": 16}).left_out


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"model_type": "mamba"}, StateMismatch, "mamba"),
        ({"hidden_act": "relu"}, StateMismatch, "relu"),
        ({"quantization_config": {}}, StateMismatch, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, StateMismatch, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, StateMismatch, "dynamic"),
        ({"num_hidden_layers": None}, StateMismatch, "num_hidden_layers"),
        ({"num_attention_heads": "4"}, StateMismatch, "num_attention_heads"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 3}, StateMismatch, "query_pre_attn_scalar"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], kind: type[CheckpointError], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        gguf_metadata.read({**CONFIG, **changed})
    assert "--as hf" in caught.value.hint


def test_without_a_config() -> None:
    with pytest.raises(NoSuchResource, match=r"config\.json"):
        gguf_metadata.read({})
