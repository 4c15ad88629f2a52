"""The methods of a Trainer that save and resume, with Holdfast behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from transformers import Trainer, TrainerCallback

from holdfast.integrations.trainers.options import TrainerOptions, check_names
from holdfast.integrations.trainers.runs import TrainerRun
from holdfast.integrations.transformers import refusals
from holdfast.integrations.transformers.data_streams import DataStreams
from holdfast.integrations.transformers.framework import TransformersTrainer
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class HoldfastTrainerMixin(Trainer):
    """A Trainer whose checkpoints are Holdfast's. `attach` inserts it behind the Trainer's own class.

    Name it among the bases of your class if tools should see its methods; `attach` is needed all the same. Overriding
    methods reach it by `super()`.
    """

    holdfast: TrainerRun | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | int | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **more: Any,
    ) -> Any:
        """Train, from the beginning or a checkpoint.

        `resume_from_checkpoint` is None or "auto": the newest sound checkpoint of the run, or the beginning if it has
        none. True: the same, but it is an error if there is none; checkpoints that transformers itself wrote into
        output_dir count too. False: begin the run again, and abandon its checkpoints. A number: this step.
        "latest-healthy": the newest that was verified, without new NaN or infinities. A directory: a checkpoint of this
        run, or one that transformers wrote. Raises `InvalidRequest` for unsupported features, and what
        `Checkpointer.restore()` and `close()` raise.
        """
        refusals.check_trial(self, trial)
        train = super().train
        run = self._run()
        _watch(self, run)

        def start(directory: str | None) -> Any:
            return train(resume_from_checkpoint=directory, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval, **more)

        return run.train(resume_from_checkpoint, start)

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        """Fetch a step's batches; none after the last step, where transformers expects one ahead.

        A JIT checkpoint may interrupt the step: it belongs to the previous step.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        if getattr(self.args, "enable_jit_checkpoint", False):
            streams = self._run().streams
            assert isinstance(streams, DataStreams)
            streams.step_begins(self.state.global_step)
        return super().get_batch_samples(*arguments, **named)

    def _run(self) -> TrainerRun:
        if self.holdfast is None:
            raise InvalidRequest(
                f"this {type(self).__name__} is attached to no run", hint='attach(trainer, "run") before train()'
            )
        return self.holdfast

    def _save_checkpoint(self, model: Any, trial: Any, *_: Any, **__: Any) -> None:
        refusals.check_trial(self, trial)
        self._run().save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._run().is_source(resume_from_checkpoint):  # else all is restored at once, after prepare()
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._run().is_source(checkpoint):
            self._run().restore()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._run().is_source(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._run().is_source(checkpoint):
            self._run().go_on()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if not self._run().load_best():
            super()._load_best_model()


class HoldfastMoments(TrainerCallback):
    """Reports events without a method of their own to the run. The last of a Trainer's callbacks."""

    def __init__(self, run: TrainerRun) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.begin(kwargs.get("train_dataloader"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.streams.epoch_begins()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "train_runtime" in logs:  # the last one of a training: transformers looks at its directories next
            self.run.settle()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.saved_step != state.global_step:
            raise InvalidRequest(
                f"{type(self.run.trainer).__name__}._save_checkpoint() does not call super(): step {state.global_step} "
                "was not saved",
                hint="call super()._save_checkpoint(model, trial) there",
            )


def attach(trainer: AnyTrainer, run: str, **options: Unpack[TrainerOptions]) -> AnyTrainer:
    """Let Holdfast save and resume a Trainer as this run, and return it. Call it on every rank, before `train()`.

    `options` are those of a `Checkpointer`: `at`, `assets`, `keep_last` (else save_total_limit), `slots`, `policy`
    (else "wait") and `file_bytes_max`. `exports` are directories by kind, such as `{"trainer": "output-trainer"}`: after a
    commit the daemon exports the checkpoint to checkpoint-N there. Subclasses of Trainer work as they are. Raises
    `InvalidRequest` with the name of an unsupported feature.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidRequest(f"attach takes a transformers.Trainer, not a {type(trainer).__name__}")
    check_names(options)
    trainer_run = TrainerRun(trainer, run, options, TransformersTrainer(trainer))
    kind = type(trainer)
    if not issubclass(kind, HoldfastTrainerMixin):
        bases = (HoldfastTrainerMixin,) if kind is Trainer else (kind, HoldfastTrainerMixin)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    trainer.holdfast = trainer_run
    return trainer


def _watch(trainer: Trainer, run: TrainerRun) -> None:
    while trainer.pop_callback(HoldfastMoments) is not None:
        pass
    trainer.add_callback(HoldfastMoments(run))
