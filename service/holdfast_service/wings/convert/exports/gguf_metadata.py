"""A model's config.json as the metadata of a GGUF file, as llama.cpp's own conversion writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats.errors import CheckpointError, NoSuchResource, StateMismatch
from holdfast_service.wings.convert.exports.plan import LeftOut
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned, Value
from holdfast_service.wings.convert.foreign.gguf.names import ARCHITECTURES, Architecture

ROPE_FACTORS = "rope_freqs.weight"
HINT = "export with --as hf, and convert the directory with llama.cpp's convert_hf_to_gguf.py"
_GEMMAS = ("gemma", "gemma2")
_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh"}  # others: silu; gemma's config may say gelu
_COUNTS = {  # the metadata's key, and config.json's
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # and their defaults in transformers


class ModelShape(NamedTuple):
    """What config.json says of a model that has a place in GGUF, and what has none."""

    architecture: Architecture
    heads: int
    key_heads: int
    head_size: int
    layers: int
    metadata: Mapping[str, Value]
    rope_factors: Sequence[float]
    left_out: tuple[LeftOut, ...]


def read(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model. `NoSuchResource` without a config.json, `StateMismatch` for what llama.cpp cannot compute."""
    if not config:
        raise NoSuchResource("GGUF needs the model's config.json", hint="pass it as an asset when you save: assets={…}")
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise refused(f"a model of type {kind!r} cannot be exported as GGUF; known are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    counts = {key: _count(config, name) for key, name in _COUNTS.items()}
    heads, width = counts["attention.head_count"], counts["embedding_length"]
    key_heads = _count(config, "num_key_value_heads", heads)
    head_size = _count(config, "head_dim", 256 if kind in _GEMMAS else 128 if kind == "qwen3" else width // max(heads, 1))
    _check_computation(config, kind, head_size, width, heads)
    rope, factors = _rope(config, head_size)
    values: dict[str, Value] = {key: Unsigned(count) for key, count in counts.items()}
    values["attention.head_count_kv"] = Unsigned(key_heads)
    values["attention.layer_norm_rms_epsilon"] = float(config.get("rms_norm_eps", 1e-6))
    values |= rope
    if architecture.permuted:
        values["rope.dimension_count"] = Unsigned(head_size)
    if kind in (*_GEMMAS, "qwen3") or "head_dim" in config:
        values |= {"attention.key_length": Unsigned(head_size), "attention.value_length": Unsigned(head_size)}
    left_out: list[LeftOut] = []
    if kind == "gemma2":
        values |= {key: float(config.get(key, usual)) for key, usual in _SOFTCAPS.items()}
        values["attention.sliding_window"] = Unsigned(_count(config, "sliding_window", 4096))
    elif config.get("sliding_window") and (kind == "mistral" or config.get("use_sliding_window")):
        left_out.append(LeftOut("sliding_window of config.json", f"GGUF's {architecture.name} always attends to all tokens"))
    named: dict[str, Value] = {"general.architecture": architecture.name, "general.type": "model"}
    named |= {f"{architecture.name}.{key}": value for key, value in values.items()}
    layers = counts["block_count"]
    return ModelShape(architecture, heads, key_heads, head_size, layers, named, factors, tuple(left_out))


def refused(what: str) -> CheckpointError:
    return StateMismatch(what, hint=HINT)


def _count(config: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    value = config.get(name)
    value = usual if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise refused(f"config.json has {name} = {value!r}, but GGUF needs a positive number")
    return value


def _check_computation(config: Mapping[str, Any], kind: str, head_size: int, width: int, heads: int) -> None:
    """Refuse what llama.cpp computes otherwise without reading it from the file."""
    usual = _ACTIVATIONS.get(kind, "silu")
    activation = config.get("hidden_activation") or config.get("hidden_act") or usual
    if activation != usual and not (kind == "gemma" and activation == "gelu"):
        raise refused(f"the activation {activation!r} of config.json has no place in GGUF: {kind} computes {usual}")
    if config.get("quantization_config") is not None:
        raise refused("config.json has a quantization_config: only weights that are not quantised are exported as GGUF")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise refused("config.json has a partial_rotary_factor, which GGUF has no place for in this architecture")
    if kind == "gemma2" and config.get("query_pre_attn_scalar", 256) not in (head_size, width // heads):
        raise refused("config.json has a query_pre_attn_scalar that is not the size of a head")


def _rope(config: Mapping[str, Any], head_size: int) -> tuple[dict[str, Value], Sequence[float]]:
    """The metadata of the rotation, and the factors of its frequencies, if it needs any."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", scaling.get("rope_theta", 10000.0))
    made: dict[str, Value] = {"rope.freq_base": float(theta)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return made, ()
    if kind == "llama3":
        return made, _llama3_factors(scaling, float(theta), head_size)
    if kind not in ("linear", "yarn"):
        raise refused(f"the rope scaling {kind!r} of config.json has no place in GGUF")
    made |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
        made["rope.scaling.original_context_length"] = Unsigned(original)
    return made, ()


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_size: int) -> list[float]:
    """By how much each frequency is divided: Llama 3.1's interpolation between short and long waves."""
    factor, low, high, length = (
        float(scaling.get(key, usual))
        for key, usual in (
            ("factor", 8.0),
            ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0),
            ("original_max_position_embeddings", 8192),
        )
    )
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)):
        wave = 2 * math.pi / float(frequency)
        smooth = min(max((length / wave - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return factors
