"""The callback that stands in for ModelCheckpoint.

    trainer = L.Trainer(callbacks=[HoldfastCheckpoint("llama3-8b", at="/fast/checkpoints", every_n_train_steps=500)])
    trainer.fit(model, ckpt_path="last")  # the newest checkpoint of the run; from the beginning where there is none

A ModelCheckpoint saves before a step's last hooks have run, and before the validation that may follow, none of which a
resumed training would make up for. This one saves when the step is over: behind the module's `on_train_batch_end`, behind
the validation, at the end of the epoch, or where an accumulation of gradients is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpointer_options import Options
from holdfast.integrations.lightning import framework, refusals
from holdfast.integrations.lightning.contents import given as options
from holdfast.integrations.lightning.takeover import TakenOver
from holdfast.integrations.lightning.training import LEAVING, LightningRun
from holdfast.integrations.replaced_method import ReplacedMethod
from holdfast.link.checkpoint_links import unlink
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.staging.messages import Policy

_ModelCheckpoint: Any = framework.part("callbacks").ModelCheckpoint


class HoldfastCheckpoint(_ModelCheckpoint):
    """A ModelCheckpoint that saves to Holdfast, the same with all supported strategies. Use one per Trainer.

    All other saves of this Trainer go into the run too: other ModelCheckpoints, `trainer.save_checkpoint()`. A name
    `….ckpt` is a link to the step's directory, where the daemon is on this machine.
    """

    def __init__(  # noqa: PLR0913 - all options of ModelCheckpoint and Checkpointer, named, for LightningCLI and editors
        self,
        run: str,
        *,
        weights: str | None = None,
        at: str | PathLike[str] | None = None,
        assets: Any = None,
        keep_last: int | None = None,
        slots: int | None = None,
        policy: Policy = "wait",
        file_bytes_max: int | None = None,
        info: Mapping[str, Any] | None = None,
        dirpath: str | PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        """The options are those of `Checkpointer`, from `at` to `info`, and of ModelCheckpoint; both raise what they raise.

        `policy` is "wait", so that no save is dropped. Without `keep_last` the checkpoints that have a name are kept, and
        the newest; with save_top_k=-1 all. `weights` is the attribute of the LightningModule that is the model, such as
        "net": its tensors are stored under its own names, so that `from_pretrained` finds them.
        """
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
        )
        given = options(at=at, assets=assets, keep_last=keep_last, slots=slots, file_bytes_max=file_bytes_max, info=info)
        given["policy"] = policy
        _default_retention(given, self.save_top_k)
        self.holdfast = LightningRun(run, given, weights)
        self._taken: TakenOver | None = None
        self._waiting = False  # what is to be saved in this hook is saved later
        self._due: set[str] = set()  # "top", "last", and "validation" for what ModelCheckpoint saves at its end
        self._names: list[str] | None = None  # to be given to one save; None outside of such a block
        self._leaving: dict[str, str] = {}  # names to remove when their successor is committed, and where they lead

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no Trainer, and no pending saves."""
        fresh: dict[str, Any] = {"_taken": None, "_waiting": False, "_due": set(), "_names": None}
        return {**self.__dict__, **fresh, "_leaving": dict(self._leaving)}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the Trainer's checkpoints before anything is loaded. Raises `InvalidRequest`."""
        super().setup(trainer, pl_module, stage)
        self._take_over(trainer)
        refusals.check_callbacks(trainer, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what a resumed training would lose; optimizers and schedulers exist now."""
        super().on_fit_start(trainer, pl_module)
        refusals.check_fit(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Weights are written from here to the end of the optimizer's step."""
        self.holdfast.writes()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record what to save when this step is over."""
        with self._later():
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Fence: callbacks may replace the model's weights from here on."""
        super().on_validation_start(trainer, pl_module)
        self.holdfast.fence()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what is due; after the last batch of an epoch at its end."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                self._due.add("validation")
                return
            with self._in_one(trainer):
                self._save_due(trainer)
                super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what is due, and what ModelCheckpoint saves here."""
        with self._in_one(trainer):
            self._save_due(trainer)
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Return when every save is committed. Raises the error of a failed one that was not reported yet."""
        with self._in_one(trainer):
            super().on_train_end(trainer, pl_module)
        self.holdfast.end()
        if trainer.is_global_zero:
            _unlink(self._leaving)
        self._leaving.clear()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Disconnect from the daemon if training had nothing to do, and so did not end."""
        super().teardown(trainer, pl_module, stage)
        self.holdfast.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if `save_on_exception` is set, and return when every save is committed or has failed."""
        self._due.clear()
        if self._taken is not None:
            self._taken.give_up()
        name = None
        try:
            with self._in_one(trainer):
                if self._should_save_on_exception(trainer):
                    candidates = self._monitor_candidates(trainer)
                    name = self.format_checkpoint_name(metrics=candidates)
                    self._save_checkpoint(trainer, name)
                    self._save_last_checkpoint(trainer, candidates)
        except InvalidRequest as refusal:  # the exception itself is what counts
            framework.part("utilities.rank_zero").rank_zero_warn(f"nothing was saved after the exception: {refusal}")
        self.holdfast.end_after(exception)
        if name is not None and os.path.isdir(name):  # a link to what is committed
            framework.part("utilities.rank_zero").rank_zero_info(f"{type(exception).__name__}: saved {name}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Mark the restored step as saved."""
        super().on_train_start(trainer, pl_module)
        if trainer.global_step == self.holdfast.held:
            self._last_global_step_saved = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """ModelCheckpoint's state, and the names that this save's commit removes, in case the training is killed."""
        return {**super().state_dict(), LEAVING: dict(self._leaving)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the names of the restored training. Files that Lightning wrote keep their names."""
        super().load_state_dict(state_dict)
        leaving = state_dict.get(LEAVING, {})
        if self.holdfast.trainer is None:  # and so the rank is not known
            self._leaving |= leaving
        elif self.holdfast.trainer.is_global_zero:
            _unlink(leaving)
        last = str(state_dict.get("last_model_path", ""))
        if os.path.isfile(last):
            self.last_model_path = ""

    def file_exists(self, filepath: str | PathLike[str], trainer: Any) -> bool:
        """Whether a name is taken, also by an uncommitted save. Links of killed saves are free."""
        taken = trainer.is_global_zero and (
            self.holdfast.made(filepath) if self.holdfast.is_own_link(filepath) else os.path.lexists(filepath)
        )
        return bool(trainer.strategy.reduce_boolean_decision(taken, all=False))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """For ckpt_path="last": the newest checkpoint of the run. Lightning takes only existing paths."""
        self._take_over(trainer).newest_is_wanted()
        return {os.curdir}

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self._waiting:
            self._due.add("top")
        else:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self._waiting:
            self._due.add("last")
        else:
            super()._save_last_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._names is None:
            super()._save_checkpoint(trainer, filepath)
            return
        self._names.append(filepath)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """save_last="link": a second name is a link as good as the first."""
        if self._names is not None and filepath in self._names:
            self._names.append(linkpath)
        elif trainer.is_global_zero and os.path.islink(filepath):
            self.holdfast.link_as(filepath, linkpath)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._names is None:
            super()._remove_checkpoint(trainer, filepath)
        elif os.path.islink(filepath):
            self._leaving[filepath] = os.readlink(filepath)
        else:  # a file of Lightning's own
            super()._remove_checkpoint(trainer, filepath)

    def _take_over(self, trainer: Any) -> TakenOver:
        if self._taken is None or self.holdfast.trainer is not trainer:
            refusals.check_trainer(trainer)
            self.holdfast.follow(trainer)
            self._taken = TakenOver(trainer, self.holdfast)
            own = trainer._logger_connector.on_batch_end

            def on_batch_end() -> None:
                own()
                if trainer.training:
                    self._step_is_over(trainer)

            trainer._logger_connector.on_batch_end = ReplacedMethod(own, on_batch_end)
        return self._taken

    def _step_is_over(self, trainer: Any) -> None:
        """Save what is due, unless the end of an accumulation, a validation or the end of the epoch comes first."""
        loop = trainer.fit_loop.epoch_loop
        if self._taken is not None and not self.holdfast.accumulates:
            self._taken.catch_up()
        if not self._due or loop._should_accumulate() or loop.batch_progress.is_last_batch:
            return
        if loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            return
        with self._in_one(trainer):
            self._save_due(trainer)

    def _save_due(self, trainer: Any) -> None:
        due, self._due = self._due, set()
        candidates = self._monitor_candidates(trainer)
        if "top" in due:
            super()._save_topk_checkpoint(trainer, candidates)
        if "last" in due:
            super()._save_last_checkpoint(trainer, candidates)
        if "validation" in due:
            super().on_validation_end(trainer, trainer.lightning_module)

    @contextmanager
    def _later(self) -> Iterator[None]:
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    @contextmanager
    def _in_one(self, trainer: Any) -> Iterator[None]:
        """Make all saves of this block one save under several names, and remove old names when it is committed."""
        self._names = []
        try:
            yield
            names = self._names
        finally:
            self._names = None
        if names:
            assert self._taken is not None
            for name in names:
                self._leaving.pop(name, None)
            self._taken.names = names[1:]
            trainer.save_checkpoint(names[0], self.save_weights_only)
            self._remove_later(trainer, self._taken.ticket)
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.after_save_checkpoint(self)

    def _remove_later(self, trainer: Any, ticket: SaveTicket | None) -> None:
        """Remove names when the save that replaces them is committed; keep them if it fails."""
        leaving = dict(self._leaving)

        def remove(error: CheckpointError | None) -> None:
            if error is None:
                if trainer.is_global_zero:
                    _unlink(leaving)
                for name, target in leaving.items():
                    if self._leaving.get(name) == target:
                        self._leaving.pop(name, None)

        if ticket is None:
            remove(None)
        else:
            ticket.when_ended(remove)


def _unlink(names: Mapping[str, str]) -> None:
    """Remove links, unless they lead elsewhere now."""
    for name, target in names.items():
        with suppress(OSError):  # it is none any more
            if os.readlink(name) == target:
                unlink([Path(name)])


def _default_retention(given: Options, save_top_k: int) -> None:
    """Keep named checkpoints and the newest; all if there can be no names."""
    remote = str(given.get("at") or "").startswith(("http://", "https://"))
    if save_top_k != -1 and not remote:
        given.setdefault("keep_last", 1)
