"""The mapping program of a live Paddle model, with which a checkpoint is a Hugging Face checkpoint; and its config.json.

The model's class says what it makes of Hugging Face's tensors: by AOA statements (`_gen_aoa_config`), by names of layers
(`transpose_weight_keys`) or by a list of names (`_get_name_mappings`). What it does not say follows from the layers: a
Linear layer of Paddle holds [in, out], and torch's [out, in].
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from holdfast.integrations.paddle.aoa import HINT, LiveTensor, made_program
from holdfast.integrations.paddle.fleet.wrappers import unwrapped
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import Program

CONFIG = "config.json"
LINEARS = frozenset(
    {
        "Linear",
        "FusedLinear",
        "ColumnParallelLinear",
        "RowParallelLinear",
        "ColumnSequenceParallelLinear",
        "RowSequenceParallelLinear",
    }
)
_NORMS = {"_mean": "running_mean", "_variance": "running_var"}  # of a BatchNorm, in torch's words
_DEGREES = ("tensor_model_parallel_size", "tensor_parallel_degree")
_PADDLES = ("paddle", "paddleformers", "paddlenlp", "paddlefleet")
_VARIANTS = re.compile(r"(Deprecated|Pipe)+$")  # in names of classes that hold the same model
_NAME_CHARACTERS_MAX = 64


Live = Mapping[str, LiveTensor]


def _alone(live: Live) -> Live:
    return live


def program_of(model: Any, tensors: Mapping[str, Any], share: Callable[[Live], Live] = _alone) -> Program:
    """The program from Hugging Face's tensors to a model's.

    `tensors` are the model's own, by the names of the state; `share` returns those of all ranks, given this one's. Raises
    `InvalidRequest` for statements of the model that Holdfast cannot read or invert.
    """
    model = unwrapped(model).layer
    config = config_of(model)
    degree = next((size for key in _DEGREES if isinstance(size := getattr(config, key, None), int) and size > 0), 1)
    linear = turned(model)
    live = {
        name: LiveTensor(
            tuple(tensor.shape), degree if getattr(tensor, "is_distributed", False) else 1, id(tensor) in linear
        )
        for name, tensor in tensors.items()
    }
    shared = share(live)
    kind = re.sub(r"[^a-z0-9_.-]", "-", class_name(model).lower())
    return made_program(f"paddle-{kind}"[:_NAME_CHARACTERS_MAX], _statements(model, config, shared), shared)


def values_of(model: Any, config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that Hugging Face's libraries read of a model with this config."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=True, saving_file=True))
    every = config.to_dict()
    for name in inspect.signature(type(config).__init__).parameters:  # a default here may be another one there
        if name in every and name not in values and _is_json(every[name]):
            values[name] = every[name]
    values["architectures"] = values.get("architectures") or [class_name(unwrapped(model).layer)]
    values["dtype"] = values["torch_dtype"] = _usual_dtype(tensors)
    return values


def config_of(model: Any) -> Any:
    """The model's config of PaddleFormers or PaddleNLP; None if it has none."""
    for name in ("config_to_save", "config"):
        config = getattr(model, name, None)
        if hasattr(config, "to_json_string") and hasattr(config, "to_dict"):
            return config
    return None


def class_name(model: Any) -> str:
    """The class under which Hugging Face has this model. Models of PaddleFleet have the class that made them."""
    maker = getattr(getattr(model, "_gen_aoa_config", None), "__self__", None)
    kind = maker if isinstance(maker, type) else type(model)
    return _VARIANTS.sub("", kind.__name__)


def _statements(model: Any, config: Any, live: Mapping[str, LiveTensor]) -> Iterable[str]:
    """What the model's class says itself."""
    if config is None:
        return _renamed_norms(live)
    if hasattr(model, "_gen_aoa_config"):
        return list(model._gen_aoa_config(config)["aoa_statements"])
    keys = getattr(model, "transpose_weight_keys", None)
    if isinstance(keys, list):
        named = re.compile(rf"(^|\.)({'|'.join(keys)})\.weight$")
        return [f"{name}^T -> {name}" for name in live if "lora" not in name and named.search(name)]
    mappings = _name_mappings(model, config)
    return _renamed_norms(live) if mappings is None else [_of_mapping(model, one) for one in mappings]


def _name_mappings(model: Any, config: Any) -> list[Any] | None:
    """The list of a class of PaddleNLP; its base class has none. The class's name in the config chooses the prefixes."""
    if not hasattr(model, "_get_name_mappings"):
        return None
    named = copy.copy(config)
    named.architectures = getattr(config, "architectures", None) or [class_name(model)]
    try:
        return list(model._get_name_mappings(named))
    except NotImplementedError:
        return None


def _of_mapping(model: Any, mapping: Any) -> str:
    """A statement for an entry of `_get_name_mappings`, which leads from torch's names to Paddle's."""
    if mapping.action not in (None, "transpose"):
        raise InvalidRequest(
            f"{class_name(model)} makes {mapping.target_name!r} by {mapping.action!r}, which cannot be inverted", hint=HINT
        )
    return f"{mapping.source_name}{'^T' if mapping.action else ''} -> {mapping.target_name or mapping.source_name}"


def turned(model: Any) -> set[int]:
    """The ids of all matrices that Linear layers own alone; one that an embedding shares is as the embedding holds it."""
    linear: set[int] = set()
    others: set[int] = set()
    for layer in model.sublayers(include_self=True):
        for name, tensor in layer._parameters.items():
            if tensor is not None:
                alone = name == "weight" and len(tensor.shape) == 2 and _is_linear(layer)
                (linear if alone else others).add(id(tensor))
    return linear - others


def unlike_torch(model: Any, tensors: Mapping[str, Any]) -> frozenset[str]:
    """The names of this rank's tensors that a program stores transposed, or under another name, because of their layers."""
    linear = turned(unwrapped(model).layer)
    norms = {f"{stem}{theirs}" for stem in _norms(tensors) for theirs in _NORMS}
    return frozenset(norms | {name for name, tensor in tensors.items() if id(tensor) in linear})


def _is_linear(layer: Any) -> bool:
    if getattr(layer, "transpose_weight", False):
        return False
    return any(each.__name__ in LINEARS and each.__module__.split(".")[0] in _PADDLES for each in type(layer).__mro__)


def _renamed_norms(live: Mapping[str, LiveTensor]) -> list[str]:
    """The running averages of BatchNorm layers have other names in torch."""
    return [f"{stem}{theirs} -> {stem}{own}" for stem in _norms(live) for own, theirs in _NORMS.items()]


def _norms(names: Collection[str]) -> list[str]:
    """The paths of BatchNorm layers, with the dot."""
    stems = [name.removesuffix("_mean") for name in names if name.rpartition(".")[2] == "_mean"]
    return [stem for stem in stems if f"{stem}_variance" in names]


def _usual_dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of most elements."""
    counts = Counter[str]()
    for tensor in tensors.values():
        counts[str(tensor.dtype).removeprefix("paddle.")] += int(tensor.size)
    floats = {name: count for name, count in counts.items() if "float" in name} or {"float32": 1}
    return max(floats, key=lambda name: floats[name])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
