"""torchtitan: a checkpoint manager that saves to and loads from Holdfast.

    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    def llama3_8b_holdfast() -> Trainer.Config:                 # in a config registry
        config = llama3_8b()
        config.checkpoint = HoldfastCheckpointManager.Config(enable=True, run="llama3-8b", at="/fast/checkpoints")
        return config

For torchtitan 0.3.0, whose `BaseCheckpointManager` it implements. All policies of its Config mean what they mean there.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.torchtitan_state import DataPosition, ModelParts, explained
from holdfast.link.checkpoint_links import unlink
from holdfast.state.exclusion import OwnPatterns
from holdfast.state.named_entries import NamedEntry
from holdfast.tickets import SaveTicket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint, StateMismatch
from holdfast_formats.lineage import Existing

_OPTIM = "optim"  # the entry of the state
_NUMBERED = re.compile(r"step-(\d+)")
_SEED_STEP = 0
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


@dataclass(kw_only=True, slots=True)
class HoldfastCheckpointConfig(BaseCheckpointManager.Config):
    """torchtitan's own options, and where the checkpoints are: `HoldfastCheckpointManager.Config`."""

    run: str = ""
    """Name of the run, which has the checkpoints."""

    at: str | None = None
    """Where the daemon is: the directory it serves, its socket or its address. Default: your user's daemon."""


class NoSuchStep(NoSuchCheckpoint, FileNotFoundError):
    """`--checkpoint.load_step` names a missing step, for which torchtitan's own manager raises `FileNotFoundError`."""


class HoldfastCheckpointManager(BaseCheckpointManager):
    """torchtitan's checkpoints, in a run of Holdfast: no collective, nothing gathered, and training continues
    immediately.

    `<dump folder>/<folder>/step-N` is a link to the checkpoint, where the daemon is on this machine. Besides what
    torchtitan stores itself, checkpoints have the random streams of every rank.
    """

    Config = HoldfastCheckpointConfig

    def __init__(  # noqa: PLR0913 - what torchtitan's Trainer passes, by name
        self,
        config: HoldfastCheckpointConfig,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Connects nothing yet. Raises `InvalidRequest` for state that cannot be stored, and for contradictory options."""
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        self._config, self._sd_adapter = config, sd_adapter
        self._given = {"dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers}
        self._given |= {"lr_schedulers": lr_schedulers, "sd_adapter": sd_adapter, "base_folder": base_folder}
        self._parts = model_parts
        self.folder: str = filesystem.join(base_folder, config.folder)
        self._position = None if dataloader is None else DataPosition(dataloader)
        self._model = ModelParts(model_parts)
        own = {MODEL: self._model.entry(), _OPTIM: optimizers, LR_SCHEDULER: lr_schedulers}
        if self._position is not None:
            own[self._position.key] = self._position
        self._states = dict(states)
        _refuse_options(config, {*self._states, OPTIMIZER, DATALOADER, LR_SCHEDULER}, sd_adapter)
        twice = sorted({*own, OPTIMIZER, DATALOADER} & set(self._states))
        if twice:
            raise InvalidRequest(f"states has {twice[0]!r}, which the manager stores itself", hint="give it another name")
        self._state: dict[str, Any] = own | self._states
        self._linkable = not str(config.at).startswith(("http://", "https://")) and not filesystem.is_remote(self.folder)
        self.checkpointer = Checkpointer(
            config.run, self._state, at=config.at, keep_last=config.keep_latest_k or None, policy="wait"
        )
        self.ticket: SaveTicket | None = None
        self._saved: set[int] = set()
        self._rolled_back = False

    def _load(self, step: int = -1) -> bool:
        """Restore this step, or the newest complete one, or what torchtitan would load. False if there is none."""
        named = None if step == -1 else step
        if self._moving_over(named):
            return self._torchtitans_own(step)
        try:
            restored = self._restored(named)
        except StateMismatch as error:
            raise explained(error, self._parts) from error
        except NoSuchCheckpoint as error:
            if named is None:
                raise
            raise NoSuchStep(f"--checkpoint.load_step={step}: {error.detail}", hint=error.hint, **error.members) from error
        self._rolled_back = named is not None or TRAIN_STATE in self._config.exclude_from_loading
        if restored:
            return True
        initial = self._config.initial_load_path
        if initial and not self._config.initial_load_in_hf and (Path(initial) / "COMMIT").is_file():
            self._load_from(Path(os.path.realpath(initial)))
            return True
        return self._torchtitans_own(step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if torchtitan's options require it. Commits run in the background; only the last step's is awaited."""
        if not self._is_due(curr_step, last_step):
            return False
        # within a launch the state of a step is one; after a rollback the steps of before are in the way
        existing: Existing = "same" if curr_step in self._saved else "replace" if self._rolled_back else "refuse"
        if last_step and self._config.last_save_model_only:
            self.ticket = self._save_model(curr_step, existing)
        else:
            self.ticket = self.checkpointer.save(curr_step, existing=existing, wait="durable" if last_step else None)
        self._saved.add(curr_step)
        self.save_future = _future(self.ticket)
        if self._linkable and _is_first():
            self.checkpointer.link(self.ticket, Path(self.folder, f"step-{curr_step}"), required=False)
            self._unlink_old(Path(self.folder))
        return True

    def _maybe_wait_for_staging(self) -> None:
        self.checkpointer.fence()

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        future, self.save_future = self.save_future, None
        future.result()

    def _close(self) -> None:
        """Complete every save, except during an exception, when other ranks may be gone."""
        if hasattr(self, "checkpointer"):
            self.checkpointer.close(wait=sys.exc_info()[0] is None)

    def _is_due(self, step: int, last: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        return last or step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)

    def _restored(self, step: int | None) -> bool:
        """Restore everything. A seed checkpoint, step 0, has only the model."""
        if step != _SEED_STEP:
            try:
                self.checkpointer.restore(step, exclude=self._ignored())
            except StateMismatch as error:
                # Only where there is nothing but the seed: else a run that does not fit would be left for a new one.
                if step is not None or error.members.get("best") != _SEED_STEP or not self._seeded():
                    raise
            return self.checkpointer.last_restore is not None
        self.checkpointer.restore(_SEED_STEP, groups=(MODEL,))
        return True

    def _ignored(self) -> OwnPatterns:
        """Patterns of names to leave alone: excluded ones, and other ranks' positions in the data."""
        others = [f"extra/{key}" for key in (self._position.others if self._position is not None else ())]
        return OwnPatterns(others + [pattern for name in self._config.exclude_from_loading for pattern in _patterns(name)])

    def _seeded(self) -> bool:
        try:
            self.checkpointer.restore(_SEED_STEP, groups=(MODEL,))
        except NoSuchCheckpoint:
            return False
        return True

    def _load_from(self, place: Path) -> None:
        """Restore from a checkpoint of another run, in place: the model alone, or everything."""
        step = naming.parse_step_directory(place.name)
        if step is None or place.parent.name != "checkpoints":
            raise InvalidRequest(
                f"initial_load_path={place} is a checkpoint outside a root, so its run is unknown",
                hint="import it into a run with `holdfast import`",
            )
        run, root = place.parts[-3], place.parents[2]
        alone = self._config.initial_load_model_only
        state = {MODEL: self._state[MODEL]} if alone else self._state
        with Checkpointer(run, state, at=root) as source:
            source.restore(step, groups=(MODEL,) if alone else None, exclude=self._ignored())

    def _moving_over(self, step: int | None) -> bool:
        """Whether the requested step is one that torchtitan saved itself."""
        return step is not None and filesystem.isfile(filesystem.join(self.folder, f"step-{step}/.metadata"))

    def _torchtitans_own(self, step: int) -> bool:
        """Load what torchtitan's own manager would: its checkpoints in the folder, else an initial checkpoint."""
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        for path in Path(self.folder).glob("step-*") if not filesystem.is_remote(self.folder) else ():
            if (path / "COMMIT").is_file() and not self._is_ours(path):
                raise InvalidRequest(
                    f"{path} is a Holdfast checkpoint, but not of {self._config.run}",
                    hint="choose another folder, or the run of that checkpoint",
                )
        named = {field.name: getattr(self._config, field.name) for field in dataclasses.fields(BaseCheckpointManager.Config)}
        named |= {"load_only": True, "keep_latest_k": 0, "enable_first_step_checkpoint": False}
        manager = CheckpointManager(CheckpointManager.Config(**named), states=dict(self._states), **self._given)
        loaded = bool(manager.load(step))
        manager.close()
        return loaded

    def _save_model(self, step: int, existing: Existing) -> SaveTicket:
        """Save only the model, in the dtype and names of an export, and wait for the commit."""
        tensors: dict[str, Any] = self._model.state_dict()
        if self._config.last_save_in_hf:
            tensors = self._sd_adapter.to_hf(ModelWrapper(self._parts).state_dict())
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        export = NamedEntry({name: _converted(tensor, dtype) for name, tensor in tensors.items()})
        held = dict(self._state)
        self._state.clear()
        self._state[MODEL] = export
        try:
            return self.checkpointer.save(step, groups=(MODEL,), existing=existing, wait="durable", assets=self._assets())
        finally:
            self._state.clear()
            self._state.update(held)

    def _assets(self) -> dict[str, Path] | None:
        """Config and tokenizer from the assets' folder, so that the export can be loaded."""
        place = getattr(self._sd_adapter, "hf_assets_path", None)
        if not self._config.last_save_in_hf or not place or not Path(place).is_dir():
            return None
        files = (path for path in Path(place).iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS))
        return {path.name: path for path in files if naming.is_asset_name(path.name)}

    def _is_ours(self, path: Path) -> bool:
        return path.is_symlink() and naming.linked_step(self.checkpointer.run, os.readlink(path)) is not None

    def _unlink_old(self, folder: Path) -> None:
        """Remove all links but the newest, so that retention may remove the checkpoints; torchtitan's own directories
        stay.
        """
        if not self._config.keep_latest_k or not folder.is_dir():
            return
        ours = [path for path in folder.iterdir() if _NUMBERED.fullmatch(path.name) and self._is_ours(path)]
        unlink(sorted(ours, key=lambda one: int(one.name[5:]))[: -self._config.keep_latest_k])


def _patterns(name: str) -> list[str]:
    """Patterns for a name of torchtitan's states in a checkpoint."""
    if name == OPTIMIZER:
        return ["optim/*", "master/*", f"extra/{_OPTIM}", f"extra/{_OPTIM}/*"]
    if name == DATALOADER:
        return [f"extra/{DATALOADER}", f"extra/{DATALOADER}.*"]
    return [f"extra/{name}", f"extra/{name}/*", f"{name}/*"]


def _refuse_options(config: HoldfastCheckpointConfig, names: set[str], sd_adapter: Any) -> None:
    if not config.run:
        raise InvalidRequest("checkpoint.run is empty", hint="name the run: --checkpoint.run llama3-8b")
    unknown = [name for name in config.exclude_from_loading if name not in names]
    if unknown:
        raise InvalidRequest(f"exclude_from_loading has {unknown[0]!r}; the state has {', '.join(sorted(names))}")
    if OPTIMIZER in config.exclude_from_loading and LR_SCHEDULER not in config.exclude_from_loading:
        raise InvalidRequest(
            "exclude_from_loading contains the optimizer but not the lr_scheduler, which would then continue with "
            "another learning rate than the optimizer uses in its first step",
            hint='set exclude_from_loading=["optimizer", "lr_scheduler"]',
        )
    if config.last_save_in_hf and sd_adapter is None:
        raise InvalidRequest("last_save_in_hf needs a state dict adapter, which this model does not have")


def _converted(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor.detach().to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor


def _future(ticket: SaveTicket) -> Future[None]:
    future: Future[None] = Future()

    def ended(error: CheckpointError | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    ticket.when_ended(ended)
    return future


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
