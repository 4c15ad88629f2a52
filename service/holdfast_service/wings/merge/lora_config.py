"""Reads PEFT's adapter_config.json of a plain LoRA adapter. Unknown keys may change how an adapter is added to its base, and
are refused: newer versions of PEFT have kinds of LoRA that an older reader would merge wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from holdfast_formats.errors import StateMismatch

NAME = "adapter_config.json"
BYTES_MAX = 2**24
_HINT = "merge it with PEFT's merge_and_unload() and import the result"


class LoraTerms(NamedTuple):
    """The rank of an adapter's products, and their factors."""

    rank: int
    scale: float


def _off(value: Any) -> bool:
    """Whether an option is unused: PEFT writes null, false, or an empty list or object."""
    return value is None or value is False or value == [] or value == {}


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _init(value: Any) -> bool:
    """Whether the adapter began as zero, so that the base is unchanged: PiSSA, OLoRA and others change it."""
    return _flag(value) or value in ("gaussian", "eva", "orthogonal")


def _any(value: Any) -> bool:
    return True


# The keys that PEFT writes, and which of their values are plain LoRA. Those of any value choose the modules that have
# tensors, or say how the adapter was initialised, trained and loaded.
_UNDERSTOOD: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "r": _rank,
    "lora_alpha": _number,
    "use_rslora": _flag,
    "bias": lambda value: value in ("none", None),
    "init_lora_weights": _init,
    **dict.fromkeys(
        (
            "auto_mapping",
            "base_model_name_or_path",
            "eva_config",
            "exclude_modules",
            "inference_mode",
            "layers_pattern",
            "layers_to_transform",
            "lora_dropout",
            "megatron_core",
            "peft_version",
            "qalora_group_size",
            "revision",
            "runtime_config",
            "target_modules",
            "task_type",
        ),
        _any,
    ),
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "alpha_pattern",
            "arrow_config",
            "corda_config",
            "enable_lora",
            "ensure_weight_tying",
            "fan_in_fan_out",
            "layer_replication",
            "loftq_config",
            "lora_bias",
            "lora_ga_config",
            "megatron_config",
            "merge_weights",
            "modules_to_save",
            "monteclora_config",
            "rank_pattern",
            "target_parameters",
            "trainable_token_indices",
            "use_bdlora",
            "use_dora",
            "use_qalora",
            "velora_config",
        ),
        _off,
    ),
}


def read(config: bytes, name: str) -> LoraTerms:
    """Parse the configuration of the adapter `name`. `StateMismatch` for anything but plain LoRA."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{name}: cannot read {NAME}: {error}", file=NAME) from error
    if not isinstance(document, dict) or "peft_type" not in document:
        refuse(name, f"its {NAME} does not describe a LoRA adapter")
    for key in ("r", "lora_alpha"):
        if key not in document:
            refuse(name, f"its {NAME} has no {key}")
    for key, value in document.items():
        understood = _UNDERSTOOD.get(key)
        if understood is None and value is not None:  # an option that is null is not used
            refuse(name, f"its {NAME} has {key} = {_shown(value)}, an unknown key")
        if understood is not None and not understood(value):
            refuse(name, f"{key} of its {NAME} is {_shown(value)}")
    rank, alpha = document["r"], document["lora_alpha"]
    return LoraTerms(rank, alpha / (math.sqrt(rank) if document.get("use_rslora") else rank))


def refuse(name: str, what: str, tensor: str | None = None) -> NoReturn:
    """Raise `StateMismatch` for an adapter that only PEFT can merge."""
    members = {"file": NAME} if tensor is None else {"tensor": tensor}
    raise StateMismatch(f"{name} is an adapter that Holdfast cannot merge: {what}", hint=_HINT, **members)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
