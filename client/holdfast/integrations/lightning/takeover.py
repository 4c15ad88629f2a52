"""Replaces the methods of a Trainer and its strategy that save and load.

Lightning has no callback for this: FSDP and ModelParallelStrategy use no CheckpointIO, DDP uses it on rank 0 only, and
callbacks run after a checkpoint is written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.integrations.lightning import framework
from holdfast.integrations.lightning.contents import OPTIMIZERS, STATE, NotGathered
from holdfast.integrations.lightning.training import AskedStep, LightningRun
from holdfast.integrations.replaced_method import ReplacedMethod
from holdfast.link.checkpoint_links import unlink
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint

_REPLACED = (
    "save_checkpoint",
    "load_checkpoint",
    "remove_checkpoint",
    "lightning_module_state_dict",
    "optimizer_state",
    "load_model_state_dict",
    "load_optimizer_state_dict",
)


class TakenOver:
    """A Trainer whose checkpoints go to a run."""

    def __init__(self, trainer: Any, run: LightningRun) -> None:
        self._trainer, self._run = trainer, run
        self._connector = trainer._checkpoint_connector
        self._dumping = False
        self._newest = False  # ckpt_path="last" was requested
        self._shown: dict[str, Any] | None = (
            None  # the tensors that a loaded dictionary shows; None after Lightning's own load
        )
        self._filled: list[tuple[str, int]] = []  # what was restored, by name and identity
        self._restored: dict[str, Any] | None = None
        self.ticket: SaveTicket | None = None  # of the newest save
        self._put_off: list[tuple[str, bool]] = []  # paths, and whether with the weights alone
        self.names: list[str] = []  # of the next save, besides the one that Lightning passes
        self._own = {name: getattr(trainer.strategy, name) for name in _REPLACED}
        for name in _REPLACED:
            setattr(trainer.strategy, name, ReplacedMethod(self._own[name], getattr(self, f"_{name}")))
        for name in ("_select_ckpt_path", "resume_start", "dump_checkpoint"):
            own = getattr(self._connector, name)
            self._own[name] = own
            around = getattr(self, f"_around{'' if name.startswith('_') else '_'}{name}")
            setattr(self._connector, name, ReplacedMethod(own, around(own)))

    def newest_is_wanted(self) -> None:
        """The next path means the newest checkpoint of the run."""
        self._newest = True

    def _around_select_ckpt_path(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def select(*given: Any, **named: Any) -> Any:
            self._newest = False
            return own(*given, **named)

        return select

    def _around_resume_start(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            newest, self._newest = self._newest, False
            fitting = self._trainer.state.fn == "fit"
            if checkpoint_path is not None and _is_of_tuner(checkpoint_path):
                self._restored = None
                own(checkpoint_path, weights_only)
                return
            if checkpoint_path is None:
                own(None)
            else:
                wanted = AskedStep() if newest else self._run.wanted(checkpoint_path)
                if wanted is None and fitting:
                    self._run.begin_again()
                self._restored = None if wanted is None else self._run.restore(wanted)
                if wanted is None:
                    own(checkpoint_path, weights_only)
                    return
                if self._restored is not None:
                    step = self._run.restored_step
                    assert step is not None
                    named = not newest and not str(checkpoint_path).isdigit()
                    own(checkpoint_path if named else self._run.place(step), weights_only)
                    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
                    return
                if wanted.step is not None or not fitting:
                    raise NoSuchCheckpoint(
                        f"the run {self._run.run} has no checkpoint", hint="list checkpoints with `holdfast ls`"
                    )
                own(None)
            self._shown = None
            if fitting:
                self._run.begin_again()

        return resume_start

    def _around_dump_checkpoint(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def dump(*given: Any, **named: Any) -> Any:
            self._dumping = True
            try:
                return own(*given, **named)
            finally:
                self._dumping = False

        return dump

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if _is_of_tuner(filepath):
            self._own["save_checkpoint"](self._own["dump_checkpoint"](), filepath, storage_options=storage_options)
            return
        names, self.names = self.names, []
        if storage_options is not None:
            raise InvalidRequest(
                "save_checkpoint() got storage_options, which Holdfast does not support", hint="leave them out"
            )
        status = self._trainer.state.status
        requeued = Path(filepath).name.startswith("hpc_ckpt_")  # SLURM's signal came, at any moment
        if status == "running" and (self._run.mid_step or (requeued and self._run.accumulates)):
            self._put_off.append((os.fspath(filepath), OPTIMIZERS not in checkpoint))
            return
        try:
            self.ticket = self._run.save(checkpoint, list(dict.fromkeys([os.fspath(filepath), *names])))
        except CheckpointError as refusal:
            if status != "interrupted":  # else the exception that ended the training is what counts
                raise
            self._warn(f"{filepath} was not saved: {refusal.detail}")

    def catch_up(self) -> None:
        """Do the saves that were requested during the step that has ended."""
        put_off, self._put_off = self._put_off, []
        for path, weights_only in put_off:  # not by the Trainer, whose barrier other ranks have passed
            self._save_checkpoint(self._connector.dump_checkpoint(weights_only), path)

    def give_up(self) -> None:
        """Training ended with an exception during a step: report what is not saved."""
        put_off, self._put_off = self._put_off, []
        for path, _ in put_off:
            self._warn(f"{path} was not saved: the step in which it was requested did not complete")

    def _warn(self, text: str) -> None:
        hint = "use the newest checkpoint of the run"
        framework.part("utilities.rank_zero").rank_zero_warn(f"{text}; {hint}")

    def _load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        restored, self._restored = self._restored, None
        if restored is None:
            self._shown = None
            checkpoint: dict[str, Any] = self._own["load_checkpoint"](checkpoint_path, weights_only=weights_only)
            return checkpoint
        self._filled = self._run.tensors()
        held = restored[STATE]
        self._shown = {} if isinstance(held, NotGathered) else dict(held)
        return restored

    def _remove_checkpoint(self, filepath: Any) -> None:
        if not self._run.is_own_link(filepath):
            self._own["remove_checkpoint"](filepath)
        elif self._trainer.is_global_zero:
            unlink([Path(filepath)])

    def _lightning_module_state_dict(self) -> Any:
        return NotGathered(STATE) if self._dumping else self._own["lightning_module_state_dict"]()

    def _optimizer_state(self, optimizer: Any) -> Any:
        return NotGathered(OPTIMIZERS) if self._dumping else self._own["optimizer_state"](optimizer)

    def _load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load only if a hook has changed the tensors that it was shown, or rebuilt the module."""
        if self._shown is not None:
            if self._run.tensors() != self._filled:
                self._run.restore_weights()
                return
            held = checkpoint[STATE]
            if isinstance(held, NotGathered):
                return
            same = held.keys() == self._shown.keys() and all(held[name] is value for name, value in self._shown.items())
            if same:
                return
        self._own["load_model_state_dict"](checkpoint, strict=strict)

    def _load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._shown is None:
            self._own["load_optimizer_state_dict"](checkpoint)
        else:
            self._run.restore_optimizers()


def _is_of_tuner(path: Any) -> bool:
    """Whether a file is a temporary one of Lightning's Tuner."""
    return Path(str(path)).name.startswith((".lr_find_", ".scale_batch_size_"))
