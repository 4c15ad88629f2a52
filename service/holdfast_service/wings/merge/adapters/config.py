"""Reads PEFT's adapter_config.json of a LoRA adapter. Unknown keys may change how an adapter is added to its base, and are
refused: newer versions of PEFT have kinds of LoRA that an older reader would merge wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from holdfast_formats.errors import InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.programs.regexes import SafeExpression

NAME = "adapter_config.json"
BYTES_MAX = 2**24
_HINT = "merge it with PEFT's merge_and_unload() and import the result"
_MODULES_MAX = 10_000  # names, tokens or patterns that one key lists


class LoraTerms(NamedTuple):
    """The rank of a product, and its factor."""

    rank: int
    scale: float


class Pattern(NamedTuple):
    """A value for the modules whose name, or whose last parts, an expression matches; `anchored`: only the whole name."""

    expression: SafeExpression
    anchored: bool
    value: int | float

    def matches(self, module: str) -> bool:
        parts = module.split(".")
        names = [module] if self.anchored else [".".join(parts[at:]) for at in range(len(parts))]
        return any(self.expression.match(name) is not None for name in names)


class AdapterConfig(NamedTuple):
    """How an adapter is added to its base. `tokens` are by module; "" is the input embedding."""

    rank: int
    alpha: int | float
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    turned: bool = False  # fan_in_fan_out: weights are [in, out]
    ties_kept: bool = False  # ensure_weight_tying
    saved: tuple[str, ...] = ()  # modules_to_save
    parameters: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = {}
    ranks: tuple[Pattern, ...] = ()
    alphas: tuple[Pattern, ...] = ()

    def terms(self, module: str) -> LoraTerms:
        """Rank and factor of a module's product."""
        rank, alpha = _matching(self.ranks, module, self.rank), _matching(self.alphas, module, self.alpha)
        return LoraTerms(int(rank), alpha / (math.sqrt(rank) if self.rslora else rank))

    def saves(self, tensor: str) -> bool:
        """Whether a tensor belongs to a module of `modules_to_save`."""
        return any(f".{name}." in f".{tensor}" for name in self.saved)


def _matching(patterns: tuple[Pattern, ...], module: str, otherwise: int | float) -> int | float:
    """The value of the first pattern that matches, as PEFT takes it."""
    return next((pattern.value for pattern in patterns if pattern.matches(module)), otherwise)


def _pattern(text: str, value: int | float) -> Pattern:
    """Raises `InvalidRequest` and `LimitExceeded` for an expression that could take long."""
    return Pattern(SafeExpression(text.removeprefix("^").removesuffix("$")), text.startswith("^"), value)


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


def _names(value: Any) -> bool:
    return _off(value) or (
        isinstance(value, list) and len(value) <= _MODULES_MAX and all(isinstance(one, str) and one for one in value)
    )


def _patterns(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a key has values for expressions, all of which are simple enough to be run."""

    def simple(value: Any) -> bool:
        if _off(value):
            return True
        if not isinstance(value, dict) or len(value) > _MODULES_MAX or not all(map(of, value.values())):
            return False
        try:
            for text, given in value.items():
                _pattern(text, given)
        except (InvalidRequest, LimitExceeded):
            return False
        return True

    return simple


def _indices(value: Any) -> bool:
    """Tokens, or tokens by module."""
    lists = list(value.values()) if isinstance(value, dict) else [value]
    return _off(value) or all(
        isinstance(one, list) and all(type(token) is int and token >= 0 for token in one) and len(set(one)) == len(one)
        for one in lists
    )


# The keys that PEFT writes, and which of their values can be merged. Those of any value choose the modules that have
# tensors, or say how the adapter was initialised, trained and loaded.
_UNDERSTOOD: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "r": _rank,
    "lora_alpha": _number,
    "use_rslora": _flag,
    "alpha_pattern": _patterns(_number),
    "bias": lambda value: value in ("none", "all", "lora_only", None),
    "ensure_weight_tying": _flag,
    "fan_in_fan_out": _flag,
    "init_lora_weights": _init,
    "lora_bias": _flag,
    "modules_to_save": _names,
    "rank_pattern": _patterns(_rank),
    "target_parameters": _names,
    "trainable_token_indices": _indices,
    "use_dora": _flag,
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
            "arrow_config",
            "corda_config",
            "enable_lora",
            "layer_replication",
            "loftq_config",
            "lora_ga_config",
            "megatron_config",
            "merge_weights",
            "monteclora_config",
            "use_bdlora",
            "use_qalora",
            "velora_config",
        ),
        _off,
    ),
}


def read(config: bytes, name: str) -> AdapterConfig:
    """Parse the configuration of the adapter `name`. `StateMismatch` for what cannot be merged, by its key."""
    try:
        document = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise StateMismatch(
            f"{name}: cannot read {NAME}: {error}", hint="write it again by save_pretrained() of PEFT", file=NAME
        ) from error
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
    return AdapterConfig(
        document["r"],
        document["lora_alpha"],
        rslora=bool(document.get("use_rslora")),
        dora=bool(document.get("use_dora")),
        lora_bias=bool(document.get("lora_bias")),
        turned=bool(document.get("fan_in_fan_out")),
        ties_kept=bool(document.get("ensure_weight_tying")),
        saved=tuple(document.get("modules_to_save") or ()),
        parameters=tuple(document.get("target_parameters") or ()),
        tokens=_tokens(document.get("trainable_token_indices")),
        ranks=tuple(_pattern(*one) for one in (document.get("rank_pattern") or {}).items()),
        alphas=tuple(_pattern(*one) for one in (document.get("alpha_pattern") or {}).items()),
    )


def _tokens(value: Any) -> dict[str, tuple[int, ...]]:
    listed = value if isinstance(value, dict) else {"": value or ()}
    return {module: tuple(tokens) for module, tokens in listed.items() if tokens}


def refuse(name: str, what: str, tensor: str | None = None) -> NoReturn:
    """Raise `StateMismatch` for an adapter that only PEFT can merge."""
    members = {"file": NAME} if tensor is None else {"tensor": tensor}
    raise StateMismatch(f"{name} is an adapter that Holdfast cannot merge: {what}", hint=_HINT, **members)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
