"""An adapter's tensors, sorted by PEFT's names: products, biases, whole modules that it replaces, rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_service.wings.merge.adapters import config

_PREFIX = "base_model.model."
_A, _B, _BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
_TOKENS = ".token_adapter.trainable_tokens_delta"
_BASE = ".base_layer"
_COPIES = ("modules_to_save", "original_module")
_OF_PEFT = (
    "lora_",
    "token_adapter",
    "base_layer",
    *_COPIES,
)  # parts of names without a meaning here


class LoraPair(NamedTuple):
    """The product of a module: A and B, DoRA's magnitude, and a bias of B."""

    low: ForeignTensor
    high: ForeignTensor
    embedding: bool = False
    magnitude: ForeignTensor | None = None
    bias: ForeignTensor | None = None


class AdapterTensors(NamedTuple):
    """An adapter's tensors: pairs by module, replaced tensors by the name in the model, rows of tokens by module."""

    pairs: Mapping[str, LoraPair]
    replaced: Mapping[str, ForeignTensor]
    tokens: Mapping[str, ForeignTensor]


def sort(adapter: Mapping[str, ForeignTensor], name: str) -> AdapterTensors:
    """Sort the tensors of the adapter `name`. `StateMismatch` for unknown names, or a half of a pair."""
    inner = {}
    for key, tensor in adapter.items():
        if not key.startswith(_PREFIX):
            config.refuse(name, f"{key!r} is no name of PEFT's: they begin with {_PREFIX}", key)
        inner[key.removeprefix(_PREFIX)] = tensor
    pairs: dict[str, LoraPair] = {}
    replaced: dict[str, ForeignTensor] = {}
    tokens: dict[str, ForeignTensor] = {}
    for key, tensor in inner.items():
        if key.endswith((_A, _EMBEDDING_A)):
            module, pair = _pair(key, inner, name)
            pairs[module] = pair
        elif key.endswith(_TOKENS):
            tokens[key.removesuffix(_TOKENS)] = tensor
        elif not _of_pair(key, inner, name) and not _again(key, inner):
            target = _replaced(key)
            if any(part.startswith(_OF_PEFT) for part in target.split(".")):
                config.refuse(name, f"{_PREFIX + key!r} has no known meaning", _PREFIX + key)
            replaced[target] = tensor
    return AdapterTensors(pairs, replaced, tokens)


def _pair(key: str, inner: Mapping[str, ForeignTensor], name: str) -> tuple[str, LoraPair]:
    embedding = key.endswith(_EMBEDDING_A)
    module = key.removesuffix(_EMBEDDING_A if embedding else _A)
    other = module + (_EMBEDDING_B if embedding else _B)
    if other not in inner:
        config.refuse(name, f"{_PREFIX + key!r} exists without {_PREFIX + other!r}", _PREFIX + key)
    magnitude = next((inner[module + end] for end in _MAGNITUDES if module + end in inner), None)
    return module, LoraPair(inner[key], inner[other], embedding, magnitude, inner.get(module + _BIAS))


def _of_pair(key: str, inner: Mapping[str, ForeignTensor], name: str) -> bool:
    """Whether a tensor belongs to a pair, of which it is not A; `StateMismatch` if the pair has no A."""
    for end in (_B, _EMBEDDING_B, _BIAS, *_MAGNITUDES):
        if key.endswith(end):
            module = key.removesuffix(end)
            other = module + (_EMBEDDING_A if end == _EMBEDDING_B else _A)
            if other not in inner and module + _EMBEDDING_A not in inner:
                config.refuse(name, f"{_PREFIX + key!r} exists without {_PREFIX + other!r}", _PREFIX + key)
            return True
    return False


def _again(key: str, inner: Mapping[str, ForeignTensor]) -> bool:
    """Whether it is one that PEFT does not load: with its embeddings it saves those of `modules_to_save` three times, as the
    trained module, as its copy, and as the module before.
    """
    module, _, leaf = key.rpartition(".")
    owner, _, kind = module.rpartition(".")
    return kind in _COPIES and f"{owner}.{leaf}" in inner


def _replaced(key: str) -> str:
    """The name in the model: of a module that also has a product, PEFT calls the weight `base_layer.weight`."""
    module, _, leaf = key.rpartition(".")
    return f"{module.removesuffix(_BASE)}.{leaf}" if module.endswith(_BASE) else key
