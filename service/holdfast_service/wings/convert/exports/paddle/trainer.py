"""PaddleFormers' small files for resuming: the trainer's state, and its learning-rate scheduler's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_service.wings.convert.exports.paddle.state import TRAINER_KEYS, PaddleState, parameter_groups
from holdfast_service.wings.convert.exports.plan import small_file
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import MadeObject, NamedGlobal

STATE_FILE, SCHEDULER_FILE = "trainer_state.bin", "scheduler.pdparams"
DONE_FILE = ".checkpoint_done"  # what PDC and its get_last_checkpoint wait for
FILES = frozenset({STATE_FILE, SCHEDULER_FILE, DONE_FILE})
_CLASS = NamedGlobal("paddleformers.trainer.trainer_callback.TrainerState")
# The attributes of a TrainerState of a run of which nothing else is known.
_BEGUN: Mapping[str, Any] = {
    "epoch": None,
    "global_step": 0,
    "consumed_samples": 0,
    "max_steps": 0,
    "num_train_epochs": 0,
    "total_flos": 0,
    "log_history": [],
    "best_metric": None,
    "best_model_checkpoint": None,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "trial_name": None,
    "trial_params": None,
}


class TrainerFiles(NamedTuple):
    files: tuple[TargetFile, ...]
    notes: tuple[str, ...]


def trainer_files(source: ExportSource, state: PaddleState) -> TrainerFiles:
    """The files for the optimizer's number of steps; none for a checkpoint without such state. The last one says that all
    are there, as the directory's name does.

    Files kept by an import from Paddle are written back unchanged, if they are of the same step.
    """
    if not state.optimizer:
        return TrainerFiles(
            (), ("there is no optimizer state: PaddleFormers can start from this checkpoint, but not resume",)
        )
    step = source.listing.step if state.step is None else state.step
    if step is None:
        raise StateMismatch(
            "parameters have different step counts, and the source does not record the training step",
            hint="import it as RUN@STEP, and export that",
        )
    kept = source.listing.documents.get("extra", {})
    trainer, scheduler = (kept.get(key) for key in TRAINER_KEYS)
    same = isinstance(trainer, dict) and trainer.get("global_step") == step
    notes = [] if state.step is not None else [f"parameters have different step counts; the trainer's global_step is {step}"]
    attributes = (
        {key: value for key, value in trainer.items() if key != "$keys"} if same and isinstance(trainer, dict) else {}
    )
    files = [small_file(STATE_FILE, pickle_writer.dumps(MadeObject(_CLASS, {**_BEGUN, **attributes, "global_step": step})))]
    if same and isinstance(scheduler, dict):
        last = {key: value for key, value in scheduler.items() if key != "$keys"}
    else:
        rate = _rate(source)
        if rate is None:
            notes.append(f"{SCHEDULER_FILE}, which PaddleFormers needs, was not written: the learning rate is unknown")
            return TrainerFiles(tuple(files), tuple(notes))
        notes.append(f"PaddleFormers' scheduler continues from step {step} at learning rate {rate}")
        last = {"last_epoch": step, "last_lr": rate}
    files += [small_file(SCHEDULER_FILE, pickle_writer.dumps(last)), small_file(DONE_FILE, pickle_writer.dumps(step))]
    return TrainerFiles(tuple(files), tuple(notes))


def _rate(source: ExportSource) -> float | None:
    """The learning rate of the first parameter group, if it is a plain number."""
    for group in parameter_groups(source.listing.documents):
        rate = group.get("lr")
        if isinstance(rate, int | float) and not isinstance(rate, bool):
            return float(rate)
    return None
