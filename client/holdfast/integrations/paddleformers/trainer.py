"""The methods of a Trainer of PaddleFormers or PaddleNLP that save and resume, with Holdfast behind them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.integrations.paddleformers import refusals
from holdfast.integrations.paddleformers.framework import PaddleFormersTrainer
from holdfast.integrations.paddleformers.library import Library, library_of
from holdfast.integrations.trainers.options import TrainerOptions, check_names
from holdfast.integrations.trainers.runs import TrainerRun
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from paddleformers.trainer import Trainer
    from typing_extensions import Unpack
else:
    Trainer = object  # the classes that `attach` makes have the library's next

log = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer")


class HoldfastPaddleTrainer(Trainer):
    """A Trainer whose checkpoints are Holdfast's. `attach` inserts it between the Trainer's own class and the library's.

    Name it before the library's among the bases of your class if tools should see its methods; `attach` is needed all the
    same. Overriding methods reach it by `super()`.
    """

    holdfast: TrainerRun | None = None
    holdfast_side: PaddleFormersTrainer

    def train(
        self, resume_from_checkpoint: str | bool | int | None = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Train, from the beginning or a checkpoint.

        `resume_from_checkpoint` is None or "auto": the newest sound checkpoint of the run, or the beginning if it has
        none. True: the same, but it is an error if there is none; checkpoints that the library itself wrote into
        output_dir count too. False: begin the run again, and abandon its checkpoints. A number: this step.
        "latest-healthy": the newest that was verified, without new NaN or infinities. A directory: a checkpoint of this
        run, or one that the library wrote. Raises `InvalidRequest` for unsupported features, and what
        `Checkpointer.restore()` and `close()` raise.
        """
        train, run = super().train, self._run()
        while self.pop_callback(TrainerMoments) is not None:
            pass
        self.add_callback(_moments(library_of(self))(run, self.holdfast_side))

        def start(directory: str | None) -> Any:
            with self.holdfast_side.resumes_here(run.is_source(directory)):
                return train(resume_from_checkpoint=directory, ignore_keys_for_eval=ignore_keys_for_eval)

        with self.holdfast_side.taken_over():
            return run.train(resume_from_checkpoint, start)

    def _run(self) -> TrainerRun:
        if self.holdfast is None:
            raise InvalidRequest(
                f"this {type(self).__name__} is attached to no run", hint='attach(trainer, "run") before train()'
            )
        return self.holdfast

    def _save_checkpoint(self, model: Any, metrics: dict[str, float] | None = None) -> None:
        self.runtime_timer.start("checkpoint saving time")
        self.holdfast_side.evaluated(metrics)
        self._run().save()
        self.runtime_timer.stop()

    def _load_from_checkpoint(self, resume_from_checkpoint: str | None = None) -> None:
        if not self._run().is_source(resume_from_checkpoint):  # else all is restored at once, after the model is wrapped
            super()._load_from_checkpoint(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._run().is_source(checkpoint):
            self._run().restore()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_flex_checkpoint(self, resume_from_checkpoint: str) -> None:
        if self._run().is_source(resume_from_checkpoint):
            self._run().restore()
        else:
            super()._load_flex_checkpoint(resume_from_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._run().is_source(checkpoint):
            self.holdfast_side.streams.go_on()
        else:
            super()._load_rng_state(checkpoint)

    def _inner_training_loop(self, args: Any, model: Any, train_dataloader: Any, *rest: Any) -> Any:
        """Train from the restored step; a run that has ended trains no further step."""
        length, max_steps, epochs, steps_of_epoch, *others = rest
        source = self._run().source
        if source is not None:
            self.holdfast_side.resumes_at(source.step, steps_of_epoch)
            epochs = 0 if source.step >= max_steps else epochs
        self.holdfast_side.check_epochs(length)
        return super()._inner_training_loop(
            args, model, train_dataloader, length, max_steps, epochs, steps_of_epoch, *others
        )


class TrainerMoments:
    """Reports events without a method of their own to the run. The last of a Trainer's callbacks, with the library's class
    next.
    """

    def __init__(self, run: TrainerRun, side: PaddleFormersTrainer) -> None:
        self.run, self.side = run, side

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.begin(kwargs.get("train_dataloader"))
        self.run.prepare()
        self.side.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.side.streams.epoch_begins()

    def on_load_data_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.side.streams.trains()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and self.run.has_best():
            self.side.hold_best()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.side.logged(logs or {})
        if logs and "train_runtime" in logs:  # the last one of a training: the best model is due
            self.run.settle()
            if self.side.release_best():
                self.run.load_best()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.saved_step != state.global_step:
            raise InvalidRequest(
                f"{type(self.run.trainer).__name__}._save_checkpoint() does not call super(): step {state.global_step} "
                "was not saved",
                hint="call super()._save_checkpoint(model, metrics) there",
            )


def attach(trainer: AnyTrainer, run: str, **options: Unpack[TrainerOptions]) -> AnyTrainer:
    """Let Holdfast save and resume a Trainer as this run, and return it. Call it on every rank, before `train()`.

    `options` are those of a `Checkpointer`: `at`, `assets`, `keep_last` (else save_total_limit), `slots`, `policy`
    (else "wait") and `file_bytes_max`. `exports` are directories by kind, such as `{"paddle-uc": "output-uc"}`: after a
    commit the daemon exports the checkpoint to checkpoint-N there. Subclasses of Trainer work as they are. Raises
    `InvalidRequest` with the name of an unsupported feature.
    """
    library = library_of(trainer)
    check_names(options)
    attached: Any = trainer
    side = PaddleFormersTrainer(attached, library)
    trainer_run = TrainerRun(trainer, run, options, side)
    kind = type(trainer)
    if not issubclass(kind, HoldfastPaddleTrainer):
        ours = type(HoldfastPaddleTrainer.__name__, (HoldfastPaddleTrainer, library.trainer), {"__module__": __name__})
        bases = (ours,) if kind is library.trainer else (kind, ours)
        attached.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    attached.holdfast, attached.holdfast_side = trainer_run, side
    for sentence in refusals.replaced(trainer):
        log.warning("%s", sentence)
    return trainer


def _moments(library: Library) -> Any:
    return type(TrainerMoments.__name__, (TrainerMoments, library.callback), {"__module__": __name__})
