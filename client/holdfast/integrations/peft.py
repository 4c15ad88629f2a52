"""Saves a PEFT model as PEFT does: the adapter alone, under PEFT's names, beside its adapter_config.json."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from holdfast.state.modules import clean, unwrap
from holdfast.state.named import Named
from holdfast_formats.errors import InvalidRequest

# Ways to make an adapter that leave the base model as it is, or change it in the same way at every start.
_INITS = frozenset({"gaussian", "eva", "orthogonal", "pissa", "olora", "loftq"})
GROUP = "adapter_model"  # the key of the state: the files are adapter_model.safetensors, which PEFT loads


def adapter(model: nn.Module, name: str | None = None) -> Named:
    """Return the entry `adapter_model` of a state: what PEFT saves of one adapter, by PEFT's names.

    Without `name` it is the only adapter. Modules of `modules_to_save` belong to it, and embeddings where PEFT saves them.
    Raises `InvalidRequest` for a model with several adapters, for prompt learning, and for adapters that PEFT does not save
    as they are, with the tensor's name.
    """
    inner, name = _one(model, name)
    from peft import get_peft_model_state_dict

    own = inner.state_dict(keep_vars=True)
    with warnings.catch_warnings():  # PEFT warns about saved embeddings, which the checkpoint's names show
        warnings.simplefilter("ignore")
        saved = get_peft_model_state_dict(inner, state_dict=own, adapter_name=name)
    known: dict[int, list[str]] = {}
    for raw, tensor in own.items():
        known.setdefault(id(tensor), []).append(clean(raw))
    renamed: dict[str, str] = {}
    for stored, tensor in saved.items():
        names = known.get(id(tensor), [])
        if not names:
            raise InvalidRequest(
                f"PEFT saves {stored} of the adapter {name!r} in a different form than the model trains",
                hint="leave this option of the adapter out, or save the whole model: {'model': model, …}",
            )
        renamed[names.pop(0)] = stored  # tied tensors are listed under each of their names
    return Named(model, rename=renamed, only=renamed.__contains__)


def adapter_config(model: nn.Module, name: str | None = None) -> Any:
    """Return the adapter's configuration as an asset: adapter_config.json, ready for inference as PEFT writes it."""
    inner, name = _one(model, name)
    config = copy.deepcopy(inner.peft_config[name])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        base = inner.base_model.model if hasattr(inner.base_model, "model") else inner.base_model
        config.base_model_name_or_path = getattr(base, "name_or_path", None)
    return config


def _one(model: nn.Module, name: str | None) -> tuple[Any, str]:
    from peft import PeftModel

    inner: Any = unwrap(model)
    if not isinstance(inner, PeftModel):
        raise InvalidRequest(f"a {type(inner).__name__} is not a PeftModel", hint="pass what peft.get_peft_model() returned")
    names = list(inner.peft_config)
    if name is None and len(names) != 1:
        raise InvalidRequest(
            f"the model has several adapters: {', '.join(names)}",
            hint="save each one in its own run: adapter(model, name)",
        )
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise InvalidRequest(f"the model has no adapter {chosen!r}", hint=f"it has {', '.join(names)}")
    _refuse_inexact(inner.peft_config[chosen])
    if inner.peft_config[chosen].is_prompt_learning:
        raise InvalidRequest(
            f"{type(inner.peft_config[chosen]).__name__} is prompt learning: PEFT saves a different form than it trains",
            hint="save the whole model: {'model': model, …}",
        )
    return inner, chosen


def _refuse_inexact(config: Any) -> None:
    """Refuse configs that train more than PEFT saves, or change the base model randomly when it is made."""
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind == "ADALORA":
        raise InvalidRequest(
            "AdaLoRA keeps the importance of its ranks outside the model, and it is not saved",
            hint="train with LoraConfig: a resumed AdaLoRA prunes different ranks than an uninterrupted one",
        )
    way = getattr(config, "init_lora_weights", True)
    if isinstance(way, str) and way not in _INITS:
        raise InvalidRequest(
            f"init_lora_weights={way!r} changes the base model at random or from data, which the adapter does not record",
            hint="save the whole model: {'model': model, …}, or initialize with 'pissa', 'olora' or a plain way",
        )
