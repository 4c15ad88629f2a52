"""Small checkpoints of real architectures, for tests that cut them: tensors of different values, and their config.json."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, LAYERS, EXPERTS = 16, 4, 2, 4, 24, 50, 4, 4
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


def encoded(config: dict[str, Any]) -> bytes:
    return json.dumps(config).encode()


def llama(seed: int = 0) -> Tensors:
    shapes = _shared_shapes()
    for layer in range(LAYERS):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = shape
    return _filled(shapes, seed)


def mixtral(seed: int = 0) -> Tensors:
    shapes = _shared_shapes()
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{block}.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                shapes[f"{block}.experts.{expert}.{name}.weight"] = shape
    return _filled(shapes, seed)


def _shared_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{block}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{block}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes


def _filled(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
