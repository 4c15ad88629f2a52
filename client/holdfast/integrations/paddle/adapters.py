"""The adapter of a LoRAModel of PaddleFormers or PaddleNLP as PEFT has it: names, orientations and configs.

Paddle's A is [in, r] and its B [r, out], and it names them without `.weight`; PEFT has both transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.integrations.paddle import program as programs
from holdfast_formats.programs.inverse_names import Counts, shapes_back, stored_names, way_back

GROUP = "adapter_model"  # the key of the state: the files are adapter_model.safetensors, which PEFT loads
PEFT_CONFIG, PADDLE_CONFIG = "adapter_config.json", "lora_config.json"
_LORA = re.compile(r"(.+)\.(lora_[AB])")
_PREFIX = "base_model.model."
_PROBE = (2, 3)  # a shape whose transposition is another one
# Settings of a LoRAConfig that PEFT has too, and those that change nothing that is stored.
_KNOWN = frozenset(
    {
        "r",
        "lora_alpha",
        "lora_dropout",
        "rslora",
        "target_modules",
        "trainable_modules",
        "trainable_bias",
        "base_model_name_or_path",
        "dtype",
        "head_dim",
        "lora_plus_scale",
        "tensor_model_parallel_size",
        "tensor_parallel_degree",
    }
)


class AdapterTensor(NamedTuple):
    """The stored name of a tensor, and whether it is stored transposed."""

    name: str
    turned: bool


class Adapter(NamedTuple):
    """The trained tensors of a LoRAModel, by their own names, and the paths of the layers with A and B as PEFT has them.

    `fused` are layers of Paddle that have several of Hugging Face's, so that PEFT has no name for them.
    """

    tensors: Mapping[str, AdapterTensor]
    targets: tuple[str, ...]
    trained: tuple[str, ...]  # layers that are trained as a whole
    fused: tuple[str, ...]


def is_lora(layer: Any) -> bool:
    kinds = type(layer).__mro__
    return any(one.__name__ == "LoRAModel" and one.__module__.startswith(("paddleformers.", "paddlenlp.")) for one in kinds)


def base_of(layer: Any) -> Any:
    """The model inside a LoRAModel, whose names its own checkpoints have."""
    return layer.model


def unlike_peft(layer: Any) -> str | None:
    """What PEFT's LoRA lacks, so that all of the model is stored: a setting of the LoRAConfig or a trained tensor."""
    for key, value in sorted(layer.lora_config.to_dict().items()):
        if key not in _KNOWN and value not in (None, False, [], {}, ""):
            return f"{key}={value!r}"
    strange = [name for name, one in _trained(layer).items() if "lora" in name and not _is_matrix(name, one)]
    return strange[0] if strange else None


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a LoRAModel; None of any other layer, and where `unlike_peft` says why."""
    if not is_lora(layer) or unlike_peft(layer) is not None:
        return None
    trained = _trained(layer)
    owners = {name: f"{name.rpartition('.')[0]}.weight" if _LORA.fullmatch(name) else name for name in trained}
    base = _base_names(layer, owners.values())
    tensors: dict[str, AdapterTensor] = {}
    layers: dict[str, set[str]] = {"targets": set(), "trained": set(), "fused": set()}
    for name, owner in owners.items():
        one = base.get(owner)
        if one is None:
            layers["fused"].add(owner.rpartition(".")[0])
        path = (one.name if one is not None else owner).rpartition(".")[0]
        lora = _LORA.fullmatch(name)
        if lora is not None:
            layers["targets"].add(path)
            tensors[name] = AdapterTensor(f"{_PREFIX}{path}.{lora[2]}.weight", True)
        else:
            if not name.endswith(".bias"):
                layers["trained"].add(path)
            tensors[name] = one._replace(name=_PREFIX + one.name) if one else AdapterTensor(_PREFIX + name, False)
    found = {kind: tuple(sorted(paths)) for kind, paths in layers.items()}
    return Adapter(tensors, found["targets"], found["trained"], found["fused"])


def configs(layer: Any, adapter: Adapter) -> dict[str, Any]:
    """The adapter's configuration as PEFT reads it, and as PaddleFormers does."""
    own = layer.lora_config.to_dict()
    bias = own.get("trainable_bias")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": own.get("base_model_name_or_path"),
        "r": own["r"],
        "lora_alpha": own["lora_alpha"],
        "lora_dropout": own.get("lora_dropout") or 0.0,
        "use_rslora": bool(own.get("rslora")),
        "target_modules": list(adapter.targets),
        "modules_to_save": list(adapter.trained) or None,
        "bias": {"lora": "lora_only", "all": "all"}.get(bias, "none"),
        "inference_mode": True,
    }
    return {PEFT_CONFIG: values, PADDLE_CONFIG: own | {"scaling": layer.lora_config.scaling}}


def _trained(layer: Any) -> dict[str, Any]:
    return {name: one for name, one in base_of(layer).state_dict(use_hook=False).items() if not one.stop_gradient}


def _is_matrix(name: str, tensor: Any) -> bool:
    return _LORA.fullmatch(name) is not None and len(tensor.shape) == 2


def _base_names(layer: Any, wanted: Iterable[str]) -> dict[str, AdapterTensor]:
    """What Hugging Face calls these tensors of the base model, where it has one tensor for each."""
    base = base_of(layer)
    own = {name: one for name, one in base.state_dict(use_hook=False).items() if ".lora_" not in name}
    made = programs.program_of(base, own)
    names = [name for name in dict.fromkeys(wanted) if name in own]
    shapes = {name: _PROBE if len(own[name].shape) == 2 else tuple(own[name].shape) for name in names}
    back = way_back(made)
    found: dict[str, list[str]] = {}
    for stored, one in stored_names(back, shapes, {}, Counts({}, frozenset())).items():
        for name in one.of:
            found.setdefault(name, []).append(stored)
    alone = {name: several[0] for name, several in found.items() if len(several) == 1}
    turned = shapes_back(back, {name: shapes[name] for name in alone}, {})
    return {name: AdapterTensor(stored, turned[stored] == _PROBE[::-1]) for name, stored in alone.items()}
