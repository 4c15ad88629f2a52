"""The demo's model: a Llama of some 400 000 parameters in bf16, and its byte tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .text import BEGIN, END, PAD, VOCABULARY

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
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def build_tokenizer() -> Any:
    """One token a byte. GPT-2's printable stand-ins for bytes are what the tokenizers library calls byte level."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>", "<pad>"])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>", pad_token="<pad>")
