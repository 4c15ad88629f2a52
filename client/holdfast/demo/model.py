"""The demo's model: a Llama of some 400 000 parameters in bf16, and its byte tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from .text import END, PAD, VOCABULARY

WINDOW = 128


def build_model(seed: int) -> Any:
    """The model in bf16, the same on every rank that gives the same seed; input and output embeddings are tied."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * WINDOW,
        attention_dropout=0.1,
        initializer_range=0.08,  # the default suits models a hundred times wider
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def build_tokenizer() -> Any:
    """One token a byte, after the special ones."""
    make: Any = ByT5Tokenizer
    return make(extra_ids=0)
