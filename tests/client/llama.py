"""A small Llama with grouped queries and its local tensors, cut by hand with numpy as Megatron-like code cuts them."""

from __future__ import annotations

import json

import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, INTER, ROWS = 2, 16, 4, 4, 24, 30
HEAD = HIDDEN // HEADS
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTER,
    "vocab_size": ROWS,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}
CONFIG_BYTES = json.dumps(CONFIG).encode()

Arrays = dict[str, np.ndarray]


def shapes(layers: range = range(LAYERS), first: bool = True, last: bool = True) -> dict[str, tuple[int, ...]]:
    """The names of some stages, in the order of the model, and their global shapes."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (ROWS, HIDDEN)} if first else {}
    for layer in layers:
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (INTER, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INTER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INTER),
        }
    return found | ({"model.norm.weight": (HIDDEN,), "lm_head.weight": (ROWS, HIDDEN)} if last else {})


def arrays(seed: int = 0) -> Arrays:
    """The whole model; no value is zero."""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(1, 2, shape).astype(np.float32) for name, shape in shapes().items()}


def cut(whole: Arrays, tp: int, rank: int, padding: int = 0) -> Arrays:
    """The tensors of one tensor-parallel rank, unfused; with `padding`, the vocabulary's rows padded to a multiple of it."""
    found: Arrays = {}
    for name, array in whole.items():
        if "embed_tokens" in name or "lm_head" in name:
            rows = -(-ROWS // padding) * padding if padding else ROWS
            found[name] = np.split(np.pad(array, ((0, rows - ROWS), (0, 0))), tp)[rank]
        elif "o_proj" in name or "down_proj" in name:
            found[name] = np.split(array, tp, axis=1)[rank]
        elif "norm" in name:
            found[name] = array
        else:
            found[name] = np.split(array, tp)[rank]
    return found


def fused(local: Arrays) -> Arrays:
    """Queries, keys and values as one tensor, gate and up as one, each rank's own one behind the other."""
    found: Arrays = {}
    for name, array in local.items():
        if "q_proj" in name:
            parts = [array, *(local[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif "gate_proj" in name:
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([array, local[name.replace("gate", "up")]])
        elif not any(part in name for part in ("k_proj", "v_proj", ".up_proj")):
            found[name] = array
    return {name: np.ascontiguousarray(array) for name, array in found.items()}
