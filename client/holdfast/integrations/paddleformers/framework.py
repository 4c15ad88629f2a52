"""The Trainer of PaddleFormers or PaddleNLP, as a run asks for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.integrations.paddle.fleet import ranks
from holdfast.integrations.paddleformers import refusals, trainer_state
from holdfast.integrations.paddleformers.callbacks import CallbackStates, CallbackWatch
from holdfast.integrations.paddleformers.data_streams import LoaderStreams
from holdfast.integrations.paddleformers.library import Library
from holdfast.integrations.trainers.resuming import STATE_FILE
from holdfast.stage.averaging import Ema
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.checkpointer import Checkpointer

log = logging.getLogger(__name__)


class PaddleFormersTrainer:
    """What `holdfast.integrations.trainers.framework.Framework` states, for one Trainer."""

    own_files = (trainer_state.BINARY_STATE_FILE, STATE_FILE)  # the second is of PaddleNLP and older versions

    def __init__(self, trainer: Any, library: Library) -> None:
        ranks.announce()  # before the first look at the run
        self._trainer, self._library, self.library = trainer, library, library.name
        self.streams = LoaderStreams(trainer_state.form_of(trainer.args), library.module("utils.batch_sampler"))
        self._logged: dict[str, float] = {}
        self._coefficient: float | None = None
        self._holds_best = False
        self._watch = CallbackWatch(())

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Within the block the daemon keeps the average, and the Trainer none."""
        args = self._trainer.args
        self._coefficient = getattr(args, "zcc_save_ema_coef", None)  # PaddleNLP has none
        args.zcc_save_ema_coef = None
        try:
            yield
        finally:
            args.zcc_save_ema_coef = self._coefficient
            self.release_best()

    @contextmanager
    def resumes_here(self, own: bool) -> Iterator[None]:
        """Within the block, a Trainer that resumes from our checkpoint does not prepare to load one of its own: for a flex
        checkpoint, stage 3 of sharding would empty the weights, and fill its parts of them with zeros afterwards.
        """
        args = self._trainer.args
        if not own or all(stage.value != "stage3" for stage in args.sharding):
            yield
            return
        known, args.load_checkpoint_format = args.load_checkpoint_format, None
        try:
            yield
        finally:
            args.load_checkpoint_format = known

    def check(self, options: Mapping[str, Any]) -> None:
        refusals.check(self._trainer, self._library, options)

    def check_repeat(self, step: int) -> None:
        if self._trainer.model_wrapped is not self._trainer.model:  # train() would wrap it a second time
            raise InvalidRequest(
                "the newest checkpoint is damaged, and Paddle's wrappers cannot be set up twice in a process",
                hint=f"start again with resume_from_checkpoint={step}",
            )

    def live(self) -> dict[str, Any]:
        return {**trainer_state.live_objects(self._trainer), "callbacks": CallbackStates(self._callbacks)}

    def given(self) -> dict[str, Any]:
        if not self._coefficient:
            return {}
        of = "master" if trainer_state.has_masters(self._trainer) else "model"
        every = self._trainer.args.zcc_ema_interval
        return {"ema": Ema(self._coefficient, of=of, every=every, correction="none")}

    def assets(self) -> list[Any]:
        return trainer_state.assets(self._trainer)

    def groups(self) -> tuple[str, ...] | None:
        return (trainer_state.model_group(self._trainer),) if self._trainer.args.ignore_save_lr_and_optim else None

    def begin(self) -> None:
        """The first step is next."""
        self._watch = CallbackWatch(self._callbacks)

    def before_save(self) -> None:
        self._watch.look()

    @property
    def _callbacks(self) -> list[Any]:
        found: list[Any] = self._trainer.callback_handler.callbacks
        return found

    def state_file(self) -> str:
        return trainer_state.state_file(self._trainer)

    def write_state(self, directory: Path, state: bytes) -> None:
        trainer_state.write_state(directory, json.loads(state), self._library)

    def evaluated(self, metrics: Mapping[str, Any] | None) -> None:
        """Take the metrics of the evaluation before a save: it may be the best. As the library compares them."""
        trainer, wanted = self._trainer, self._trainer.args.metric_for_best_model
        if metrics is None:
            return
        self.logged(metrics)
        if wanted is not None:
            value = metrics[wanted if wanted.startswith("eval_") else f"eval_{wanted}"]
            if trainer_state.is_better(trainer, value):
                trainer.state.best_metric = value
                trainer.state.best_model_checkpoint = str(
                    Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
                )

    def resumes_at(self, step: int, steps_of_epoch: int) -> None:
        if step % steps_of_epoch == 0:
            self.streams.resumes("next")
        else:
            self.streams.resumes("again" if self._trainer.args.ignore_data_skip else "within")

    def check_epochs(self, batches: int | None) -> None:
        """Warn of batches at the end of each epoch that are no whole step, whose gradients a resumed training lacks."""
        steps = self._trainer.args.gradient_accumulation_steps
        if batches is not None and batches > steps and batches % steps:
            log.warning(
                "each epoch ends with %d batches that make no whole step: their gradients are added to the next epoch's "
                "first step, unless the training resumes there; choose a batch size with which an epoch has a multiple "
                "of gradient_accumulation_steps=%d batches",
                batches % steps,
                steps,
            )

    def hold_best(self) -> None:
        """Keep the Trainer from loading the best checkpoint from its own files: it has no method for that."""
        args = self._trainer.args
        self._holds_best = self._holds_best or bool(args.load_best_model_at_end)
        args.load_best_model_at_end = False

    def release_best(self) -> bool:
        """Whether it was held; from now on it is not."""
        held, self._holds_best = self._holds_best, False
        if held:
            self._trainer.args.load_best_model_at_end = True
        return held

    def logged(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers of a step, for its checkpoint: the Trainer itself keeps no history."""
        step = self._trainer.state.global_step
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        self._logged = numbers if self._logged.get("global_step") != step else self._logged | numbers
        self._logged["global_step"] = step

    def metrics(self) -> dict[str, float]:
        step = self._trainer.state.global_step
        known = self._logged if self._logged.get("global_step") == step else {}
        return {name: value for name, value in known.items() if name != "global_step"}

    def best_step(self) -> int | None:
        return trainer_state.best_step(self._trainer.state)

    def restore_best(self, checkpointer: Checkpointer) -> None:
        """Restore the weights, with their masters if there are some."""
        masters, saved = trainer_state.has_masters(self._trainer), self.groups() is None
        model = trainer_state.model_group(self._trainer)
        checkpointer.restore(
            self.best_step(),
            groups=(model, "master") if masters and saved else (model,),
            masters="from-model" if masters and not saved else None,
        )

    def reads_files(self) -> bool:
        plain = self._library.callback.on_save
        return any(_reads_files(one, plain) for one in self._callbacks)

    def published(self, directory: Path) -> None: ...


def _reads_files(callback: Any, plain: object) -> bool:
    """Whether a callback may read a checkpoint's directory in `on_save`, which does nothing in `plain`."""
    if getattr(type(callback), "on_save", None) in (None, plain):
        return False
    return not type(callback).__module__.startswith(f"{__package__}.")  # our own
