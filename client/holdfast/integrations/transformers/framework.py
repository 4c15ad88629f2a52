"""The Trainer of transformers, as a run asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config import uploads_checkpoints
from holdfast.integrations.trainers.resuming import STATE_FILE
from holdfast.integrations.transformers import refusals, trainer_state
from holdfast.integrations.transformers.data_streams import DataStreams
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.checkpointer import Checkpointer

# Their on_save reads no files, unless W&B uploads checkpoints.
_CALLERS = ("WandbCallback", "TrackioCallback", "SwanLabCallback")


class TransformersTrainer:
    """What `holdfast.integrations.trainers.framework.Framework` states, for one Trainer."""

    library = "transformers"
    own_files = (STATE_FILE,)

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.streams = DataStreams(trainer.args.world_size, lambda: trainer.holdfast.install_streams())

    def check(self, options: Mapping[str, Any]) -> None:
        refusals.check(self._trainer, options)

    def check_repeat(self, step: int) -> None:
        if self._trainer.args.neftune_noise_alpha is not None:  # train() would add its noise a second time
            raise InvalidRequest(
                "the newest checkpoint is damaged, and NEFTune cannot be set up twice in a process",
                hint=f"start again with resume_from_checkpoint={step}",
            )

    def live(self) -> dict[str, Any]:
        return trainer_state.live_objects(self._trainer)

    def given(self) -> dict[str, Any]:
        return {}

    def assets(self) -> list[Any]:
        return trainer_state.assets(self._trainer)

    def groups(self) -> tuple[str, ...] | None:
        return (trainer_state.model_group(self._trainer),) if self._trainer.args.save_only_model else None

    def before_save(self) -> None:
        self._trainer.store_flos()

    def state_file(self) -> str:
        return trainer_state.state_file(self._trainer)

    def write_state(self, directory: Path, state: bytes) -> None:
        (directory / STATE_FILE).write_bytes(state)

    def metrics(self) -> dict[str, float]:
        return trainer_state.metrics(self._trainer)

    def best_step(self) -> int | None:
        step: int | None = self._trainer.state.best_global_step
        return step

    def restore_best(self, checkpointer: Checkpointer) -> None:
        checkpointer.restore(self.best_step(), groups=(trainer_state.model_group(self._trainer),))

    def reads_files(self) -> bool:
        return self._trainer.args.push_to_hub or any(reads_files(one) for one in self._trainer.callback_handler.callbacks)

    def published(self, directory: Path) -> None:
        if self._trainer.args.push_to_hub:
            self._trainer._push_from_checkpoint(str(directory))


def reads_files(callback: Any) -> bool:
    """Whether a callback may read a checkpoint's directory in `on_save`."""
    from transformers import TrainerCallback

    if getattr(type(callback), "on_save", None) in (None, TrainerCallback.on_save):
        return False
    if type(callback).__module__.startswith(f"{__package__}."):
        return False  # our own
    if type(callback).__module__.startswith("transformers.") and type(callback).__name__ in _CALLERS:
        return type(callback).__name__ == _CALLERS[0] and uploads_checkpoints()
    return True
