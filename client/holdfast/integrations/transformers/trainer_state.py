"""A Trainer's state for a Checkpointer: the live objects, and the files beside them."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

from holdfast.integrations.peft import GROUP, adapter, adapter_config
from holdfast.integrations.trainers import log
from holdfast.state.modules import unwrap
from holdfast_formats.errors import InvalidRequest

ARGUMENTS_FILE = "training_args.json"


def peft_model(trainer: Any) -> Any | None:
    """The PEFT model that is trained; None if the model is another one."""
    if "peft" not in sys.modules:  # without peft there is no such model
        return None
    from peft import PeftMixedModel, PeftModel

    model = unwrap(trainer.model)
    if isinstance(model, PeftMixedModel):
        raise InvalidRequest("PeftMixedModel cannot be saved", hint="train one adapter with PeftModel")
    return model if isinstance(model, PeftModel) else None


def live_objects(trainer: Any) -> dict[str, Any]:
    """The entries of the state: the model or its adapter, optimizer, scheduler, and scaler if there is one."""
    peft = peft_model(trainer)
    state: dict[str, Any] = {"model": trainer.model_wrapped} if peft is None else {GROUP: adapter(peft)}
    state |= {"optim": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        state["scaler"] = scaler
    return state


def model_group(trainer: Any) -> str:
    return "model" if peft_model(trainer) is None else GROUP


def assets(trainer: Any) -> list[Any]:
    """What belongs beside the weights in every checkpoint: configs, tokenizer or processor, training arguments."""
    from transformers import PreTrainedModel

    peft = peft_model(trainer)
    model: Any = unwrap(trainer.model)
    files: list[Any] = [{ARGUMENTS_FILE: trainer.args.to_json_string()}]
    if peft is not None:
        files.append(adapter_config(peft))
    elif isinstance(model, PreTrainedModel):
        files.append(_config(model))
        if model.can_generate():
            files.append(model.generation_config)
    elif hasattr(getattr(model, "config", None), "save_pretrained"):
        files.append(model.config)
    processor = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if hasattr(processor, "save_pretrained"):
        files.append(processor)
    return files


def state_file(trainer: Any) -> str:
    """The TrainerState, with the current states of callbacks.

    Text, because losses may be NaN, which the Trainer reads and writes as it is.
    """
    from transformers.trainer_callback import ExportableState, TrainerState

    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
    values = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
    return log.as_json(values, "and let a callback's state() return JSON values")


def metrics(trainer: Any) -> dict[str, float]:
    return log.metrics(trainer.state.log_history, trainer.state.global_step, "step")


def _config(model: Any) -> Any:
    """A copy of the model's config with what save_pretrained() adds: the architecture and the dtype."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config
