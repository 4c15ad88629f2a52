"""What distinguishes the directories of a Trainer and of Accelerate from those of models, by names of files alone."""

from __future__ import annotations

import re

from holdfast_formats.files import Files

TRAINER_STATE = "trainer_state.json"
OPTIMIZER, SCHEDULER, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
RANDOM_OF_TRAINER = re.compile(r"rng_state(_\d+)?\.pth")
RANDOM_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
ZERO = re.compile(r"global_step\d+")  # DeepSpeed's directory beside a Trainer's own files


def is_trainer(files: Files) -> bool:
    """Whether a Trainer can resume from the directory. One with `save_only_model` is a model."""
    names = files.list("")
    beside = any(name in (OPTIMIZER, SCHEDULER) or RANDOM_OF_TRAINER.fullmatch(name) for name in names)
    return TRAINER_STATE in names and beside and not any(ZERO.fullmatch(name) for name in names)


def is_accelerate(files: Files) -> bool:
    """Whether `Accelerator.save_state()` wrote the directory, without DeepSpeed."""
    names = files.list("")
    found = any(RANDOM_OF_ACCELERATE.fullmatch(name) for name in names)
    return found and TRAINER_STATE not in names and not any(name == "latest" for name in names)
