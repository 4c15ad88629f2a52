"""The Llama that every system of the matrix trains, and the rows that it trains on."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH, STEPS = 64, 8, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH, "rope_theta": 10000.0, "attention_bias": False,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def rows(number: int) -> torch.Tensor:
    """Four rows of the step of this number, one token longer than the model sees."""
    return torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def llama(seed: int) -> Any:
    """The model as Transformers has it, with values of its own for each seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of the rows, of which the model saw all tokens but the last."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
