"""Small models of the kinds that are trained: their config, and every tensor with values that occur once.

How tensor parallelism cuts them is said here once more, by hand, and not read from the product's tables.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

HEADS, ROWS, COLUMNS, VOCABULARY = "heads", "rows", "columns", "vocabulary"


class Tensor(NamedTuple):
    """Shape, how it is cut (with the number of heads where that counts), whose stage, and the expert it belongs to."""

    shape: tuple[int, ...]
    cut: str = ""
    heads: int = 1
    stage: int | str = "every"
    expert: int | None = None
    dimension: int = 0  # along which it is cut


class Model(NamedTuple):
    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    experts: int = 0
    layers: int = 0

    def arrays(self, seed: int = 0) -> Arrays:
        """All tensors, F32; whole numbers, none of them zero and none twice within some millions."""
        found: Arrays = {}
        first = 1 + 1000 * seed
        for name, tensor in self.tensors.items():
            found[name] = np.arange(first, first + prod(tensor.shape), dtype=np.float32).reshape(tensor.shape)
            first += prod(tensor.shape)
        return found


def llama(layers: int = 5, hidden: int = 16, heads: int = 4, kv_heads: int = 2, vocabulary: int = 30) -> Model:
    """Grouped-query attention, gated MLP; a vocabulary that no power of two divides."""
    inter, width = 24, hidden // heads
    tensors = {"model.embed_tokens.weight": Tensor((vocabulary, hidden), VOCABULARY, stage="first")}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        attention = {
            "q_proj": Tensor((heads * width, hidden), HEADS, heads, layer),
            "k_proj": Tensor((kv_heads * width, hidden), HEADS, kv_heads, layer),
            "v_proj": Tensor((kv_heads * width, hidden), HEADS, kv_heads, layer),
            "o_proj": Tensor((hidden, heads * width), COLUMNS, stage=layer, dimension=1),
        }
        tensors |= {f"{at}.self_attn.{name}.weight": tensor for name, tensor in attention.items()}
        tensors |= _gated(f"{at}.mlp", hidden, inter, layer, None)
        tensors |= _norms(at, hidden, layer)
    tensors["model.norm.weight"] = Tensor((hidden,), stage="last")
    tensors["lm_head.weight"] = Tensor((vocabulary, hidden), VOCABULARY, stage="last")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inter,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    return Model("llama", config, tensors, layers=layers)


def moe(layers: int = 3, experts: int = 4, stacked: bool = False) -> Model:
    """Qwen3-MoE: experts one by one, or stacked as current transformers holds them."""
    hidden, heads, kv_heads, inter, vocabulary = 16, 4, 2, 8, 32
    dense = llama(layers, hidden, heads, kv_heads, vocabulary)
    tensors = {name: tensor for name, tensor in dense.tensors.items() if ".mlp." not in name}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.{name}.weight": Tensor((hidden // heads,), stage=layer) for name in ("q_norm", "k_norm")
        }
        tensors[f"{at}.mlp.gate.weight"] = Tensor((experts, hidden), stage=layer)
        for expert in range(experts):
            tensors |= _gated(f"{at}.mlp.experts.{expert}", hidden, inter, layer, expert)
    config = {
        **dense.config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inter,
        "num_experts": experts,
        "head_dim": hidden // heads,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Model("moe", config, tensors, experts, layers)


def neox(layers: int = 3) -> Model:
    """GPT-NeoX: query, key and value interleaved head by head, and stored so."""
    hidden, heads, vocabulary, inter = 16, 4, 32, 64
    tensors = {"gpt_neox.embed_in.weight": Tensor((vocabulary, hidden), VOCABULARY, stage="first")}
    for layer in range(layers):
        at = f"gpt_neox.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= {f"{at}.{norm}.{part}": Tensor((hidden,), stage=layer) for part in ("weight", "bias")}
        tensors |= {
            f"{at}.attention.query_key_value.weight": Tensor((3 * hidden, hidden), HEADS, heads, layer),
            f"{at}.attention.query_key_value.bias": Tensor((3 * hidden,), HEADS, heads, layer),
            f"{at}.attention.dense.weight": Tensor((hidden, hidden), COLUMNS, stage=layer, dimension=1),
            f"{at}.attention.dense.bias": Tensor((hidden,), stage=layer),
            f"{at}.mlp.dense_h_to_4h.weight": Tensor((inter, hidden), ROWS, stage=layer),
            f"{at}.mlp.dense_h_to_4h.bias": Tensor((inter,), ROWS, stage=layer),
            f"{at}.mlp.dense_4h_to_h.weight": Tensor((hidden, inter), COLUMNS, stage=layer, dimension=1),
            f"{at}.mlp.dense_4h_to_h.bias": Tensor((hidden,), stage=layer),
        }
    tensors |= {f"gpt_neox.final_layer_norm.{part}": Tensor((hidden,), stage="last") for part in ("weight", "bias")}
    tensors["embed_out.weight"] = Tensor((vocabulary, hidden), VOCABULARY, stage="last")
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inter,
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    return Model("neox", config, tensors, layers=layers)


def _gated(at: str, hidden: int, inter: int, layer: int, expert: int | None) -> dict[str, Tensor]:
    return {
        f"{at}.gate_proj.weight": Tensor((inter, hidden), ROWS, 1, layer, expert),
        f"{at}.up_proj.weight": Tensor((inter, hidden), ROWS, 1, layer, expert),
        f"{at}.down_proj.weight": Tensor((hidden, inter), COLUMNS, 1, layer, expert, dimension=1),
    }


def _norms(at: str, hidden: int, layer: int) -> dict[str, Tensor]:
    return {
        f"{at}.{name}.weight": Tensor((hidden,), stage=layer) for name in ("input_layernorm", "post_attention_layernorm")
    }
