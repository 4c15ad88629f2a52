"""Adds LoRA adapters to the weights that they were trained on: W + s·B·A, computed in float64 and rounded to F32."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.foreign.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.daemon.merging.recipe_document import nearest

CONFIG = "adapter_config.json"
CONFIG_BYTES_MAX = 2**24
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What an adapter may be besides plain LoRA, by the keys of PEFT's configuration.
_OTHERS = (
    "use_dora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "use_qalora",
)
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")


class Adapted(NamedTuple):
    """Weights with what an adapter adds to them. One product after the other is added, so no box changes a bit."""

    weight: ForeignTensor
    low: ForeignTensor  # A, [rank, in]
    high: ForeignTensor  # B, [out, rank]
    scale: float

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.weight, self.low, self.high

    @property
    def terms(self) -> float:
        return self.scale

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        rank = self.low.spec.shape[0]
        (row, column), (rows, columns) = box.offset, box.shape
        low = fetch(self.low, Box((0, column), (rank, columns))).astype(np.float64)
        high = fetch(self.high, Box((row, 0), (rows, rank))).astype(np.float64)
        made, part = np.zeros(box.shape), np.empty(box.shape)
        for k in range(rank):
            made += np.multiply(high[:, k : k + 1], low[k : k + 1], out=part)
        made *= self.scale
        made += fetch(self.weight, box).astype(np.float64)
        return made.astype(np.float32)


def adapted(
    weights: Mapping[str, ForeignTensor], adapter: Mapping[str, ForeignTensor], config: bytes, name: str
) -> dict[str, ForeignTensor]:
    """The weights, by name, with those that an adapter changes as F32. `name` is the adapter's, for errors.

    Raises `StateMismatch`, by name, for anything but plain LoRA of these weights.
    """
    scale_of = _scale(config, name)
    made, pairs = dict(weights), _pairs(adapter, name)
    for module, (low, high) in pairs.items():
        target = f"{module}{_WEIGHT}"
        if target not in weights:
            hint = nearest(target, weights) or "is it an adapter of another model?"
            raise StateMismatch(f"{name}: the model has no tensor {target!r}, which it adapts", hint=hint, tensor=target)
        spec, rank = weights[target].spec, low.spec.shape[0] if low.spec.shape else 0
        if len(spec.shape) != 2 or low.spec.shape != (rank, spec.shape[1]) or high.spec.shape != (spec.shape[0], rank):
            shapes = f"{list(high.spec.shape)} × {list(low.spec.shape)}"
            raise StateMismatch(f"{name}: {shapes} is not added to {target!r} of {list(spec.shape)}", tensor=target)
        if rank:
            added = TensorSpec(spec.group, spec.name, "F32", spec.shape)
            made[target] = ForeignTensor(added, (), decoder=Adapted(weights[target], low, high, scale_of(rank)))
    return made


def check_alike(configs: Mapping[str, bytes], first: str) -> None:
    """`StateMismatch` where adapters that are merged with each other are not added to their base in the same way."""
    scales = {name: _scale(config, name)(1) for name, config in configs.items()}
    for name, scale in scales.items():
        if scale != scales[first]:
            raise StateMismatch(
                f"lora_alpha of {CONFIG} is {scale:g} in {name}, and {scales[first]:g} in {first}",
                hint="merge each adapter into its base first, as MODEL+ADAPTER",
                file=CONFIG,
            )


def _pairs(adapter: Mapping[str, ForeignTensor], name: str) -> dict[str, tuple[ForeignTensor, ForeignTensor]]:
    made = {}
    for key, tensor in adapter.items():
        other = key.removesuffix(_A) + _B if key.endswith(_A) else key.removesuffix(_B) + _A
        if not key.startswith(_PREFIX) or not key.endswith((_A, _B)):
            _refuse(name, f"{key!r} is neither lora_A nor lora_B of a weight", key)
        if other not in adapter:
            _refuse(name, f"{key!r} is there without {other!r}", key)
        if key.endswith(_A):
            made[key.removeprefix(_PREFIX).removesuffix(_A)] = tensor, adapter[other]
    return made


def _scale(config: bytes, name: str) -> Any:
    """By what a product of a rank is multiplied."""
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{name}: cannot read {CONFIG}: {error}", file=CONFIG) from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        _refuse(name, f"{CONFIG} is not that of a LoRA adapter")
    for key in _OTHERS:
        if found.get(key):
            _refuse(name, f"{key} of its {CONFIG} is {found[key]!r}")
    if isinstance(found.get("init_lora_weights"), str) and found["init_lora_weights"] not in _PLAIN_INITS:
        _refuse(name, f"init_lora_weights {found['init_lora_weights']!r} has changed the weights under it")
    if found.get("bias", "none") != "none":
        _refuse(name, f"it trains biases ({found['bias']})")
    alpha = found.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        _refuse(name, f"lora_alpha is {alpha!r}")
    power = 0.5 if found.get("use_rslora") else 1.0
    return lambda rank: alpha / rank**power


def _refuse(name: str, what: str, tensor: str | None = None) -> NoReturn:
    members = {} if tensor is None else {"tensor": tensor}
    hint = "merge it with PEFT's merge_and_unload(), and import the model"
    raise StateMismatch(f"{name} is an adapter that Holdfast cannot merge: {what}", hint=hint, **members)
