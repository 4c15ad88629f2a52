"""Refuses features of a Lightning Trainer that this adapter does not support, before anything is trained or staged."""

from __future__ import annotations

from typing import Any

from holdfast.integrations.lightning import framework
from holdfast_formats.errors import InvalidRequest

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_USED = {  # what is replaced or called of Lightning's own, 2.6
    "_checkpoint_connector": ("_select_ckpt_path", "resume_start", "dump_checkpoint", "_loaded_checkpoint", "_ckpt_path"),
    "fit_loop": ("run", "_load_combined_loader_states", "on_advance_start", "epoch_progress", "is_resuming"),
    "_logger_connector": ("on_batch_end",),
}


def check_trainer(trainer: Any) -> None:
    """Raise `InvalidRequest` for an unknown Trainer class, or one that saves in another way."""
    if not isinstance(trainer, framework.part("").Trainer):
        raise InvalidRequest(
            f"the Trainer does not come from {framework.name()}, for which the callback was made",
            hint="import the package whose Trainer you use before holdfast.integrations.lightning",
        )
    for place, names in _USED.items():
        missing = [name for name in names if not hasattr(getattr(trainer, place, None), name)]
        if missing:
            raise InvalidRequest(
                f"this version of Lightning has no Trainer.{place}.{missing[0]}, which Holdfast needs",
                hint="use Lightning 2.6",
            )
    strategy = trainer.strategy
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    others = any("XLA" in kind for kind in kinds) or "DeepSpeedStrategy" in kinds
    if others or not any(kind in _STRATEGIES for kind in kinds) or _saves_otherwise(strategy):
        hint = f"supported strategies are {', '.join(_STRATEGIES)}"
        if "DeepSpeedStrategy" in kinds:
            hint = "write your own loop, with holdfast.integrations.deepspeed.attach(engine, …)"
        raise InvalidRequest(f"the strategy {kinds[0]} is not supported", hint=hint)
    if getattr(strategy, "_start_method", "popen") not in (None, "popen"):
        raise InvalidRequest(
            f"the start method {strategy._start_method!r} starts ranks from a process that cannot see their checkpoints",
            hint='use Trainer(strategy="ddp"), or start the script with torchrun',
        )
    io = type(strategy.checkpoint_io).__name__
    if io != "TorchCheckpointIO":
        raise InvalidRequest(
            f"the plugin {io} would never be used: HoldfastCheckpoint saves without a CheckpointIO",
            hint="leave the plugin out, or use ModelCheckpoint with HoldfastCheckpointIO",
        )


def _saves_otherwise(strategy: Any) -> bool:
    """Whether a third-party strategy has its own way to save, as NeMo's have."""
    package = framework.name().partition(".")[0]
    for method in ("save_checkpoint", "load_checkpoint", "lightning_module_state_dict", "optimizer_state"):
        owner = next(kind for kind in type(strategy).__mro__ if method in vars(kind))
        if owner.__module__.partition(".")[0] != package:
            return True
    return False


def check_callbacks(trainer: Any, callback: Any) -> None:
    """Raise `InvalidRequest` for callbacks and loggers whose state would be lost or wrong."""
    others = [one for one in trainer.callbacks if type(one) is type(callback) and one is not callback]
    if others:
        raise InvalidRequest(
            "two HoldfastCheckpoint callbacks would make two runs of one training job",
            hint="use one HoldfastCheckpoint, and ModelCheckpoint for the others: their saves go into the same run",
        )
    swa = framework.part("callbacks").StochasticWeightAveraging
    if any(isinstance(one, swa) for one in trainer.callbacks):
        raise InvalidRequest(
            "StochasticWeightAveraging does not average in a resumed epoch, and Lightning has no option to change that",
            hint="use WeightAveraging or EMAWeightAveraging, whose averages are stored",
        )
    for logger in trainer.loggers:
        if getattr(logger, "_log_model", False) in (True, "all"):  # DummyLogger has an object under every name
            raise InvalidRequest(
                f"{type(logger).__name__}(log_model=…) uploads checkpoints as files, but these are directories",
                hint="set log_model=False; `holdfast export` makes a copy to upload",
            )
    if "://" in str(callback.dirpath or ""):
        raise InvalidRequest(
            f"dirpath={callback.dirpath!r} is not a directory on this machine, so links cannot be made there",
            hint="give a local directory",
        )


def check_fit(trainer: Any) -> None:
    """Raise `InvalidRequest` for schedulers that would lose a step when training resumes."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            raise InvalidRequest(
                "ReduceLROnPlateau with the interval 'step' steps on a metric after a save, and that step would be lost",
                hint="use the interval 'epoch', or a scheduler that needs no metric",
            )


def accumulates(trainer: Any) -> bool:
    batches, epochs = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.epoch_progress.current
    if trainer.state.fn != "fit" or trainer.state.status not in ("running", "interrupted"):
        return False
    if epochs.processed == epochs.started or (batches.is_last_batch and batches.current.ready == batches.current.processed):
        return False
    return bool(batches.current.processed % trainer.accumulate_grad_batches)


def check_save(trainer: Any) -> None:
    """Raise `InvalidRequest` during an accumulation of gradients, which no checkpoint contains."""
    if accumulates(trainer):
        raise InvalidRequest(
            "the save is during gradient accumulation, and accumulated gradients are not saved",
            hint="save after every accumulate_grad_batches-th batch; HoldfastCheckpoint waits for it",
        )
