"""Adds LoRA adapters to the weights that they were trained on: W + s·B·A, computed in float64 and rounded to F32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.near_names import did_you_mean
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge import lora_config

_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_A, _B = ".lora_A.weight", ".lora_B.weight"


class Adapted(NamedTuple):
    """Weights with an adapter's change. Products are added in a fixed order, so no box changes a bit."""

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
        arrangement, part = np.zeros(box.shape), np.empty(box.shape)
        for k in range(rank):
            arrangement += np.multiply(high[:, k : k + 1], low[k : k + 1], out=part)
        arrangement *= self.scale
        arrangement += fetch(self.weight, box).astype(np.float64)
        return arrangement.astype(np.float32)


def adapted(
    weights: Mapping[str, ForeignTensor], adapter: Mapping[str, ForeignTensor], config: bytes, name: str
) -> dict[str, ForeignTensor]:
    """The weights, by name, with those that an adapter changes as F32. `name` is the adapter's, for errors.

    Raises `StateMismatch` for anything but plain LoRA of these weights.
    """
    terms = lora_config.read(config, name)
    adapted_weights, pairs = dict(weights), _pairs(adapter, name)
    _check_rank(pairs, terms.rank, name)
    for module, (low, high) in pairs.items():
        target = f"{module}{_WEIGHT}"
        if target not in weights:
            hint = did_you_mean(target, weights, "check that the adapter belongs to this model")
            raise StateMismatch(f"{name} adapts tensor {target!r}, which the model does not have", hint=hint, tensor=target)
        spec, rank = weights[target].spec, terms.rank
        if len(spec.shape) != 2 or low.spec.shape != (rank, spec.shape[1]) or high.spec.shape != (spec.shape[0], rank):
            shapes = f"{list(high.spec.shape)} × {list(low.spec.shape)}"
            raise StateMismatch(f"{name}: {shapes} cannot be added to {target!r} of {list(spec.shape)}", tensor=target)
        added = TensorSpec(spec.group, spec.name, "F32", spec.shape)
        adapted_weights[target] = ForeignTensor(added, (), decoder=Adapted(weights[target], low, high, terms.scale))
    return adapted_weights


class AdapterParts(NamedTuple):
    """An adapter that is merged with others: its configuration and its tensors."""

    config: bytes
    tensors: Mapping[str, ForeignTensor]


def check_alike(adapters: Mapping[str, AdapterParts], first: str) -> None:
    """`StateMismatch` if merged adapters are not added to their base in the same way."""
    terms = {name: lora_config.read(one.config, name) for name, one in adapters.items()}
    for name, adapter_terms in terms.items():
        _check_rank(_pairs(adapters[name].tensors, name), adapter_terms.rank, name)
        if adapter_terms != terms[first]:
            raise StateMismatch(
                f"{name} has rank {adapter_terms.rank} and scale {adapter_terms.scale:g} in its {lora_config.NAME} "
                f"(lora_alpha, use_rslora), but {first} has rank {terms[first].rank} and scale "
                f"{terms[first].scale:g}",
                hint="merge each adapter into its base first, as MODEL+ADAPTER",
                file=lora_config.NAME,
            )


def _check_rank(pairs: Mapping[str, tuple[ForeignTensor, ForeignTensor]], rank: int, name: str) -> None:
    """`StateMismatch` for a product of another rank than the configuration's: it would be scaled wrong."""
    for low, _ in pairs.values():
        if low.spec.shape[:1] != (rank,):
            what = f"its {lora_config.NAME} has r = {rank}, but {low.spec.name!r} has shape {list(low.spec.shape)}"
            lora_config.refuse(name, what, low.spec.name)


def _pairs(adapter: Mapping[str, ForeignTensor], name: str) -> dict[str, tuple[ForeignTensor, ForeignTensor]]:
    pairs = {}
    for key, tensor in adapter.items():
        other = key.removesuffix(_A) + _B if key.endswith(_A) else key.removesuffix(_B) + _A
        if not key.startswith(_PREFIX) or not key.endswith((_A, _B)):
            lora_config.refuse(name, f"{key!r} is neither lora_A nor lora_B of a weight", key)
        if other not in adapter:
            lora_config.refuse(name, f"{key!r} exists without {other!r}", key)
        if key.endswith(_A):
            pairs[key.removeprefix(_PREFIX).removesuffix(_A)] = tensor, adapter[other]
    return pairs
