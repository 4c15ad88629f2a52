"""The run of a Lightning Trainer: its state, its saves and their links, and restores."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.lightning import refusals
from holdfast.integrations.lightning.contents import AVERAGED, KEY, OPTIMIZERS, is_checkpoint
from holdfast.integrations.lightning.live_state import WEIGHTS, LiveState, is_flat
from holdfast.integrations.lightning.positions import EpochPosition
from holdfast.stage.save_request import Wait
from holdfast.state.exclusion import OwnPatterns
from holdfast.tensors import json_values
from holdfast.tickets import SaveTicket, settle
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, Damaged, InvalidRequest, StateMismatch
from holdfast_formats.lineage import Existing

if TYPE_CHECKING:
    from holdfast.checkpointer_options import Options

log = logging.getLogger(__name__)

LEAVING = "holdfast_leaving"  # in a callback's state: names that go when the save is committed
_OF_TRAINING = OwnPatterns(("extra/rng", "extra/data", "extra/ranks/*/rng/*", "extra/ranks/*/data/*"))


class AskedStep(NamedTuple):
    step: int | None = None


class _Save(NamedTuple):
    ticket: SaveTicket
    marks: str  # loops and callbacks, as text
    whole: bool  # with the optimizers


class LightningRun:
    """The run of one Trainer. It holds no connection and no memory between trainings."""

    def __init__(self, run: str, options: Options, weights: str | None) -> None:
        """`weights` is the LightningModule's attribute whose own names the group `model` has."""
        self.run, self._options, self._weights = naming.check_run(run), options, weights
        self.trainer: Any = None
        self._root: Path | None = None  # the daemon's, if it is on this machine; known after a restore
        self._position: EpochPosition | None = None
        self._checkpointer: Checkpointer | None = None
        self._state: LiveState | None = None
        self._saves: dict[int, _Save] = {}
        self._versions: list[int] = []  # of the parameters, when they were restored
        self._restored: tuple[int, AskedStep] | None = None  # and not all of it yet
        self.held: int | None = None  # the step that the live state was saved as or restored from last

    def __reduce__(self) -> tuple[type[LightningRun], tuple[str, Options, str | None]]:
        """A copy has no Trainer."""
        return LightningRun, (self.run, self._options, self._weights)

    @property
    def _live(self) -> LiveState:
        assert self._state is not None
        return self._state

    @property
    def linkable(self) -> bool:
        return not str(self._options.get("at") or "").startswith(("http://", "https://"))

    @property
    def mid_step(self) -> bool:
        """Whether an optimizer steps, or has stepped for a batch that does not count as trained yet."""
        return self._position is not None and self._position.mid_step

    def writes(self) -> None:
        if self._position is not None:
            self._position.steps.writes()

    @property
    def accumulates(self) -> bool:
        return refusals.accumulates(self.trainer)

    def follow(self, trainer: Any) -> None:
        if trainer is not self.trainer:
            self.trainer, self._position = trainer, EpochPosition(trainer, self._go_on)
            self._state = LiveState(trainer, self._weights, self._position)
            self._saves, self.held = {}, None

    def begin_again(self) -> None:
        """Training begins without a checkpoint. Raises `InvalidRequest` if the run has some of another training."""
        assert self._position is not None
        self._position.forget()
        self.end()
        checkpointer = self._construct(optimizers=False)
        if self.held is not None:
            checkpointer.goes_on_from(self.held)
            return
        with_nothing = Checkpointer(self.run, {}, at=self._options.get("at"))
        try:
            newest = with_nothing.restore(groups=("extra",), exclude=OwnPatterns(("extra/*",)), strict=False)
        finally:
            with_nothing.close(wait=False)
        if with_nothing.last_restore is not None:
            raise InvalidRequest(
                f"the run {self.run} has checkpoints up to step {newest}, but this training would start without them",
                hint='fit(…, ckpt_path="last") continues from the newest; give a new training run another name',
            )

    def save(self, checkpoint: dict[str, Any], names: list[str]) -> SaveTicket | None:
        """Save the live state under the step in Lightning's dictionary, and link the names to it.

        Returns None if this state was saved before.
        """
        assert self._position is not None
        refusals.check_save(self.trainer)
        self._position.check()
        step, whole = int(checkpoint["global_step"]), OPTIMIZERS in checkpoint
        document = self._live.reduced(checkpoint)
        self._position.correct_loops(document.get("loops", {}))
        marks, before = _marks(document), self._saves.get(step)
        ended = self._checkpointer is None
        checkpointer = self._checkpointer or self._construct(optimizers=whole)
        if ended and self.held is not None:
            checkpointer.goes_on_from(self.held)
        ticket: SaveTicket | None
        same = (
            before is not None
            and (before.whole or not whole)
            and (before.marks == marks or self._position.progress.in_flight)
        )
        covered = not whole and (step == self.held if before is None else before.whole)  # weights, beside everything
        if step == self.held and self._position.awaited:  # what was restored, and nothing is trained since
            self._check_unchanged(step)
            covered = True
        if same or covered or (before is None and step == self.held and self._position.progress.in_flight):
            ticket = None if before is None else before.ticket
        else:
            self._live.refresh(optimizers=True)
            self._live.document.value = document
            ticket = self._save(checkpointer, step, whole, before)
            self._saves[step], self.held = _Save(ticket, marks, whole), step
        if self.trainer.is_global_zero and self.linkable:
            for name in names:
                made = step if ticket is None or (ended and ticket.done) else ticket
                checkpointer.link(made, name, required=False)
        if ended:
            self.end()
        return ticket

    def _check_unchanged(self, step: int) -> None:
        if self._versions != self._versions_now():
            raise InvalidRequest(
                f"the weights were changed after the restore of step {step} and before the next step, so a save "
                "now would replace the restored checkpoint",
                hint="save after the first step, or to another run",
            )

    def _versions_now(self) -> list[int]:
        return [-1 if one.is_inference() else one._version for one in self.trainer.lightning_module.parameters()]

    def restore(self, wanted: AskedStep) -> dict[str, Any] | None:
        """Restore what exists already, and return Lightning's dictionary; None if the run has no checkpoint yet.

        That is everything for strategies that restore after their setup. Others make their optimizers later.
        """
        self.end()
        self._restored = None
        trainer = self.trainer
        if trainer.state.fn != "fit":
            return self._restore_weights(wanted)
        whole = bool(trainer.strategy.restore_checkpoint_after_setup)
        checkpointer = self._construct(optimizers=whole)
        groups = None if whole else (*(group for group in WEIGHTS if group in self._live.entries), "extra")
        step = self._restore_newest(checkpointer, groups) if wanted.step is None else None
        if step is None:
            step = checkpointer.restore(wanted.step, groups=groups, strict=self._strict)
        if checkpointer.last_restore is None:
            return None
        self._restored, self._root = (step, wanted), checkpointer.root()
        if whole:
            self._settle(step)
        return self._live.shown()

    def _restore_newest(self, checkpointer: Checkpointer, groups: tuple[str, ...] | None) -> int | None:
        """The newest checkpoint with optimizers; weights alone may be newer. None if there is none."""
        try:
            return checkpointer.restore(groups=groups, needs=("optim",), strict=self._strict)
        except StateMismatch as lacking:
            if tuple(lacking.members.get("missing", ())) != ("optim",):
                raise
            return None

    def tensors(self) -> list[tuple[str, int]]:
        """The parameters and buffers of the module, by name and identity."""
        module = self.trainer.lightning_module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return [(name, id(tensor)) for name, tensor in named]

    def restore_weights(self) -> None:
        """Restore the weights again: `on_load_checkpoint` has made modules."""
        assert self._restored is not None
        step, wanted = self._restored
        if self.trainer.state.fn != "fit":
            self._restore_weights(AskedStep(step))
            self._restored = step, wanted
            return
        assert self._checkpointer is not None
        self._live.refresh(optimizers=bool(self.trainer.strategy.restore_checkpoint_after_setup))
        groups = tuple(group for group in WEIGHTS if group in self._live.entries)
        self._checkpointer.restore(step, groups=groups, strict=self._strict)

    def restore_optimizers(self) -> None:
        """Restore optimizers. If they are damaged, restore everything of the previous checkpoint."""
        assert self._checkpointer is not None and self._restored is not None
        step, wanted = self._restored
        self._live.refresh(optimizers=True)
        if "optim" in self._live.entries:
            try:
                self._checkpointer.restore(step, groups=("optim",), strict=self._strict)
            except Damaged as error:
                if wanted.step is not None:
                    raise
                log.warning("%s@%d is damaged (%s): restoring an older step", self.run, step, error)
                step = self._restore_older()
        self._settle(step)

    def place(self, step: int) -> str:
        """The path of a step requested by its number, or of the newest."""
        return os.path.join(self._root or "", naming.checkpoint_path(self.run, step))

    @property
    def restored_step(self) -> int | None:
        return None if self._restored is None else self._restored[0]

    def wanted(self, path: str | os.PathLike[str] | int) -> AskedStep | None:
        """The step of a path or number; None for a file of Lightning's own.

        Raises `InvalidRequest` for a checkpoint of another run, `NoSuchCheckpoint` for a missing one.
        """
        step = path if isinstance(path, int) else _step_at(os.fspath(path), self.run, self._options)
        return None if step is None else AskedStep(naming.check_step(step))

    def is_own_link(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is a link to a checkpoint of this run, existing or not."""
        return os.path.islink(path) and naming.linked_step(self.run, os.readlink(path)) is not None

    def made(self, path: str | os.PathLike[str]) -> bool:
        """Whether a link leads to a step saved or restored here, which may not be committed yet."""
        step = naming.linked_step(self.run, os.readlink(path)) if os.path.islink(path) else None
        return step is not None and (step in self._saves or Path(path).exists())

    def link_as(self, name: str, other: str) -> None:
        step = naming.linked_step(self.run, os.readlink(name))
        if step is not None and self._checkpointer is not None:
            save = self._saves.get(step)
            self._checkpointer.link(step if save is None else save.ticket, other, required=False)

    def fence(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def end(self) -> None:
        """Complete every save. Raises the error of a failed one that was not reported yet."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def end_after(self, error: BaseException) -> None:
        """Complete every save after an error. A save's own error is only logged."""
        try:
            self.end()
        except CheckpointError as failure:
            log.error("a save of %s failed before the training ended with %s: %s", self.run, type(error).__name__, failure)

    def _save(self, checkpointer: Checkpointer, step: int, whole: bool, before: _Save | None) -> SaveTicket:
        assert self._position is not None
        existing: Existing = "refuse"
        if before is not None:  # without a step in between, but loops or callbacks have gone on
            settle(before.ticket)
            existing = "replace"
        elif step == self.held:  # the step that was restored
            existing = "replace"
        groups = (
            None if whole else [group for group in (*WEIGHTS, "extra") if group == "extra" or group in self._live.entries]
        )
        # WeightAveraging swaps the weights for a validation, and at the end.
        wait: Wait | None = "staged" if "ema" in self._live.entries else None
        with self._position.as_of_last_batch():
            return checkpointer.save(step, groups=groups, metrics=_metrics(self.trainer), existing=existing, wait=wait)

    def _restore_weights(self, wanted: AskedStep) -> dict[str, Any] | None:
        """For validation, tests and predictions: restore only the weights."""
        entries = self._live.entries
        entries.clear()
        entries[KEY] = self._live.document
        checkpointer = self._checkpointer = Checkpointer(self.run, entries, **self._chosen())
        try:
            step = checkpointer.restore(wanted.step, groups=("extra",), exclude=_OF_TRAINING, strict=False)
            if checkpointer.last_restore is None:
                return None
            module = self.trainer.strategy.model if is_flat(self.trainer) else self.trainer.lightning_module
            averaged = bool(self._live.document.value.get(AVERAGED))
            self._live.entries.update({"ema": module} if averaged else self._live.modules())
            groups = tuple(group for group in WEIGHTS if group in self._live.entries)
            checkpointer.restore(step, groups=groups, exclude=OwnPatterns(("ema/n_averaged",)), strict=self._strict)
            self._root = checkpointer.root()
        finally:
            self._checkpointer = None
            checkpointer.close(wait=False)
        self._restored = (step, wanted)
        return self._live.shown()

    def _restore_older(self) -> int:
        assert self._checkpointer is not None
        connector = self.trainer._checkpoint_connector
        step = self._checkpointer.restore(strict=self._strict)
        connector._loaded_checkpoint = self._live.shown()
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        return step

    def _settle(self, step: int) -> None:
        assert self._checkpointer is not None and self._restored is not None
        self._checkpointer.goes_on_from(step)
        self._restored, self.held = (step, self._restored[1]), step
        self._saves, self._versions = {}, self._versions_now()
        report = self._checkpointer.last_restore
        log.info("resumed %s@%d from the %s", self.run, step, "" if report is None else report.source)

    def _construct(self, optimizers: bool) -> Checkpointer:
        self._live.refresh(optimizers)
        self._checkpointer = Checkpointer(self.run, self._live.entries, **self._chosen())
        return self._checkpointer

    def _chosen(self) -> Options:
        chosen = self._options.copy()
        chosen.setdefault("policy", "wait")
        config = getattr(self._live.inner(), "config", None)
        if hasattr(config, "save_pretrained"):
            chosen.setdefault("assets", [config])
        return chosen

    @property
    def _strict(self) -> bool:
        return bool(self.trainer.lightning_module.strict_loading)

    def _go_on(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.restore_random()


def _step_at(path: str, run: str, options: Options) -> int | None:
    if path.isascii() and path.isdigit() and not os.path.lexists(path):
        return int(path)
    if not os.path.lexists(path) or os.path.isfile(path):
        return None
    with Checkpointer(run, {}, at=options.get("at")) as asked:
        step = asked.step_at(path)
    if step is None and is_checkpoint(path):
        raise InvalidRequest(
            f"{path} is a checkpoint of a run or root other than {run}",
            hint="give HoldfastCheckpoint that run, or read its weights with load_from_checkpoint()",
        )
    return step


def _metrics(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}


def _marks(document: Mapping[str, Any]) -> str:
    """Distinguishes two saves of one step: the loops' progress, and callbacks' states."""
    callbacks = {name: _without_key(kept, LEAVING) for name, kept in document.get("callbacks", {}).items()}
    loops = {name: _progress(loop) for name, loop in document.get("loops", {}).items()}

    def place(_: tuple[str, ...], tensor: Any) -> str:
        return str(tensor.tolist()) if tensor.numel() <= 1 else f"{tuple(tensor.shape)}"

    return json_values.dumps([loops, callbacks], KEY, place)


def _without_key(kept: Any, key: str) -> Any:
    return {name: value for name, value in kept.items() if name != key} if isinstance(kept, dict) else kept


def _progress(loop: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in loop.items() if not name.endswith("state_dict")}
