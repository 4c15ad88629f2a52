"""A Trainer's state for a Checkpointer: the live objects, and the files beside them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.integrations import paddle
from holdfast.integrations.paddle import adapters, entries
from holdfast.integrations.paddle.fleet.wrappers import unwrapped
from holdfast.integrations.paddleformers.data_streams import ParallelForm, TrainerStreams
from holdfast.integrations.paddleformers.library import Library
from holdfast.integrations.trainers import log
from holdfast.integrations.trainers.resuming import STATE_FILE

ARGUMENTS_FILE = "training_args.json"
BINARY_STATE_FILE = "trainer_state.bin"  # as PaddleFormers writes and reads it
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_SECRET = ("_token", "_key")


def live_objects(trainer: Any) -> dict[str, Any]:
    """The entries of the state: model, optimizer, scheduler, the scaler if gradients are scaled, random streams."""
    scaler = trainer.scaler if trainer.do_grad_scaling else None
    found = paddle.state(trained_layer(trainer), trainer.optimizer, trainer.lr_scheduler, scaler)
    return found | {entries.RANDOM: TrainerStreams()}


def trained_layer(trainer: Any) -> Any:
    """The Trainer's model, or what stage 3 of sharding has made of it, which alone knows the parts."""
    return trainer.model_wrapped if unwrapped(trainer.model_wrapped).stage_3 is not None else trainer.model


def form_of(args: Any) -> ParallelForm:
    """The form of parallelism that the training's arguments say."""
    if args.world_size == 1:
        return ParallelForm()
    tensor, stages = (max(size, 1) for size in (args.tensor_model_parallel_size, args.pipeline_model_parallel_size))
    return ParallelForm(args.dataset_world_size, tensor, stages, str(args.hybrid_parallel_topo_order))


def model_group(trainer: Any) -> str:
    return "model" if adapters.adapter_of(trainer.model) is None else adapters.GROUP


def assets(trainer: Any) -> list[Any]:
    """What belongs beside the weights in every checkpoint, and the state does not bring along: tokenizer, processor,
    training arguments.
    """
    values = {name: value for name, value in trainer.args.to_dict().items() if not name.endswith(_SECRET)}
    arguments = log.as_json(values, "and give it plain values", default=str)
    files: list[Any] = [{ARGUMENTS_FILE: arguments}]
    tokenizer = trainer.tokenizer if getattr(trainer.args, "save_tokenizer", True) else None  # PaddleNLP always saves it
    processor = getattr(trainer, "processing_class", None)
    return [*files, *(one for one in (tokenizer, processor) if hasattr(one, "save_pretrained"))]


def state_file(trainer: Any) -> str:
    """The TrainerState; numbers of numpy as plain ones."""
    values = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
    return log.as_json(values, "in place of tensors", default=_plain)


def write_state(directory: Path, values: dict[str, Any], library: Library) -> None:
    """Write it as the library reads it; values that another version had are left out."""
    kind = library.module("trainer.trainer_callback").TrainerState
    known = {field.name for field in dataclasses.fields(kind)}
    state = kind(**{name: value for name, value in values.items() if name in known})
    if library.is_paddlenlp:
        state.save_to_json(str(directory / STATE_FILE))
    else:
        state.save(str(directory / BINARY_STATE_FILE))


def best_step(state: Any) -> int | None:
    """The step of the best checkpoint, by the name of its directory."""
    match = _CHECKPOINT.fullmatch(Path(state.best_model_checkpoint or "").name)
    return None if match is None else int(match[1])


def has_masters(trainer: Any) -> bool:
    """Whether half-precision weights have full-precision masters."""
    args = trainer.args
    return bool(args.fp16_opt_level == "O2" and (args.bf16 or args.fp16))


def is_better(trainer: Any, value: float) -> bool:
    best = trainer.state.best_metric
    if best is None or trainer.state.best_model_checkpoint is None:
        return True
    return bool(value > best if trainer.args.greater_is_better else value < best)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")
