"""The matrix's models at the size of real ones, as shapes alone, and the manifest that a save of them would have.

Some layers stand for all: the vocabulary is cut down as the layers are, so that each kind of tensor has its share of the
bytes, and extents are as long as the whole model's save makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.disk.manifests import Extent, Manifest, TensorEntry
from holdfast_formats.disk.packing import extent_bytes, pack, tensor_extent_bytes
from holdfast_formats.layout import rules
from holdfast_formats.layout.elements import Specs
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

from . import models

KEYS = ("exp_avg", "exp_avg_sq")


class Real(NamedTuple):
    """The stored tensors of each group, what rules know of them, and the bytes of all groups of the whole model."""

    name: str
    groups: dict[str, Specs]
    rules: rules.Rules
    whole_bytes: int


def _real(name: str, small: models.Model, layers: int, config: dict[str, int], shapes: dict[str, Shape]) -> Real:
    """`layers` is the whole model's number of them, `shapes` are by the last word of a name before `.weight`."""
    weights: dict[str, Shape] = {}
    for tensor in small.tensors:
        path, _, kind = tensor.rpartition(".")
        shape = shapes[path.rpartition(".")[2]]
        weights[tensor] = shape[:1] if kind == "bias" else shape
    groups: dict[str, Specs] = {
        "model": {tensor: ("BF16", shape) for tensor, shape in weights.items()},
        "master": {tensor: ("F32", shape) for tensor, shape in weights.items()},
        "optim": {f"{tensor}/{key}": ("F32", shape) for tensor, shape in weights.items() for key in KEYS}
        | {f"{tensor}/step": ("F32", ()) for tensor in weights},
    }
    known: dict[str, Any] = {**small.config, **config}
    return Real(name, groups, rules.choose(known, weights), nbytes(groups) * layers // small.layers)


def llama() -> Real:
    """Llama-3-8B: 5 of its 32 layers."""
    hidden, inter, key_value, vocabulary = 4096, 14336, 1024, 128256 * 5 // 32
    shapes: dict[str, Shape] = {
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "q_proj": (hidden, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
    }
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (hidden,))
    sizes = {"hidden_size": hidden, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": inter}
    return _real("llama", models.llama(), 32, {**sizes, "vocab_size": vocabulary}, shapes)


def moe() -> Real:
    """Qwen3-30B-A3B: 3 of its 48 layers, 128 experts in each."""
    hidden, inter, query, key_value, vocabulary, width = 2048, 768, 4096, 512, 151936 * 3 // 48, 128
    shapes: dict[str, Shape] = {
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, query),
        "gate": (128, hidden),
        "gate_proj": (inter, hidden),
        "up_proj": (inter, hidden),
        "down_proj": (hidden, inter),
        "q_norm": (width,),
        "k_norm": (width,),
    }
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (hidden,))
    sizes = {"hidden_size": hidden, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": width}
    experts = {"num_experts": 128, "moe_intermediate_size": inter}
    return _real("moe", models.moe(experts=128), 48, {**sizes, **experts, "vocab_size": vocabulary}, shapes)


def neox() -> Real:
    """Pythia-6.9B: 3 of its 32 layers; query, key and value in one tensor, head by head."""
    hidden, vocabulary = 4096, 50432 * 3 // 32
    shapes: dict[str, Shape] = {
        "embed_in": (vocabulary, hidden),
        "embed_out": (vocabulary, hidden),
        "query_key_value": (3 * hidden, hidden),
        "dense": (hidden, hidden),
        "dense_h_to_4h": (4 * hidden, hidden),
        "dense_4h_to_h": (hidden, 4 * hidden),
    }
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm", "final_layer_norm"), (hidden,))
    sizes = {"hidden_size": hidden, "num_attention_heads": 32, "intermediate_size": 4 * hidden}
    return _real("neox", models.neox(), 32, {**sizes, "vocab_size": vocabulary}, shapes)


REAL = {"llama": llama, "moe": moe, "neox": neox}


def manifest(groups: Mapping[str, Specs], whole_bytes: int) -> Manifest:
    """Files, places and extents as a save of `whole_bytes` would make them; the digests are nobody's."""
    longest = extent_bytes(whole_bytes)
    tensors: dict[str, dict[str, TensorEntry]] = {group: {} for group in groups}
    specs = (TensorSpec(group, name, *spec) for group, listed in groups.items() for name, spec in listed.items())
    for file in pack(specs):
        for spec, start in file.tensors:
            length = tensor_extent_bytes(spec.nbytes, longest)
            extents = tuple(Extent(at, min(length, spec.nbytes - at), "0" * 16) for at in range(0, spec.nbytes, length))
            tensors[spec.group][spec.name] = TensorEntry(spec.dtype, spec.shape, file.name, start, extents)
    return Manifest(1, "r", 1, 1, "2026-01-01T00:00:00Z", 1, {}, {}, (), tensors, {})


def nbytes(groups: Mapping[str, Specs]) -> int:
    return sum(dtypes.nbytes(dtype, prod(shape)) for specs in groups.values() for dtype, shape in specs.values())
