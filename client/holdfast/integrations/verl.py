"""verl: a checkpoint manager that saves to and loads from Holdfast, for actors and critics under FSDP1 and FSDP2.

    # my_checkpoints.py, on PYTHONPATH; start the training with VERL_USE_EXTERNAL_MODULES=my_checkpoints
    from holdfast.integrations.verl import install

    install("qwen-grpo", at="/fast/checkpoints")

Each role has a run: qwen-grpo-actor, qwen-grpo-critic. For verl 0.9.1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.utils.checkpoint import fsdp_checkpoint_manager
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from holdfast.checkpointer import Checkpointer
from holdfast.link.checkpoint_links import unlink
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options

_OWN = fsdp_checkpoint_manager.FSDPCheckpointManager
_NAME = "FSDPCheckpointManager"  # what verl's engines call the class that they make
_GROUPS = {"model": "model", "optimizer": "optim", "extra": "extra"}
_KNOWN = (*_GROUPS, "hf_model")
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_INSIDE = "holdfast"  # the link in a step's folder, where that folder itself is what verl calls the checkpoint
_settings: dict[str, Any] = {}


def install(run: str, **options: Unpack[Options]) -> None:
    """Make verl's workers in this process save to and load from Holdfast runs: `run`-actor, `run`-critic.

    `options` are those of `Checkpointer`; `keep_last` defaults to verl's `max_actor_ckpt_to_keep` or
    `max_critic_ckpt_to_keep`. Call it in every process that has a worker: in a module that VERL_USE_EXTERNAL_MODULES
    names. Raises `InvalidRequest` for an invalid run name, and if another run is installed already.
    """
    naming.check_run(run)
    if _settings and _settings != {"run": run, "options": options}:
        raise InvalidRequest("install() was already called with other arguments", hint="call uninstall() first")
    _settings.update(run=run, options=options)
    _replace(_OWN, VerlCheckpoints)


def uninstall() -> None:
    """Give verl its own manager back, for workers made from now on."""
    _settings.clear()
    _replace(VerlCheckpoints, _OWN)


class VerlCheckpoints(BaseCheckpointManager):
    """Replaces verl's FSDPCheckpointManager: nothing is gathered, and the directory loads on any number of ranks.

    A save returns after the commit, because verl's trainer then records this step as the one to resume from.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        **given: Any,
    ) -> None:
        """Connects nothing yet. Raises `InvalidRequest` for unsupported options of verl's."""
        processing_class = processing_class or given.pop("tokenizer", None)  # its old name
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        if not _settings:
            raise InvalidRequest(
                "holdfast.integrations.verl.install() was not called",
                hint='call holdfast.integrations.verl.install("run", at=…)',
            )
        self._given = given | {"processing_class": processing_class, "checkpoint_config": checkpoint_config}
        self._run, self._options = str(_settings["run"]), dict(_settings["options"])
        _refuse_config(self)
        self._checkpointer: Checkpointer | None = None
        self._restored: int | None = None

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save, and return after the commit; `local_path` becomes a link to the checkpoint.

        Raises what `Checkpointer.save` and the commit raise, and, before anything is saved, `InvalidRequest` for an
        HDFS path.
        """
        if local_path is None:
            return
        if hdfs_path is not None:
            raise InvalidRequest(
                f"hdfs_path={hdfs_path!r}: Holdfast saves only to its own root",
                hint="set trainer.default_hdfs_dir=null; `holdfast export` makes copies",
            )
        checkpointer = self._saving(local_path, max_ckpt_to_keep)
        link = _link(local_path)
        # staged first: verl moves parameters between devices when this returns, and other processes may want the memory
        groups = self._groups(checkpointer, self.checkpoint_save_contents)
        ticket = checkpointer.save(
            global_step, groups=groups, wait="staged", existing=self._existing(global_step), assets=self._assets()
        )
        if self.rank == 0 and checkpointer.root() is not None:
            checkpointer.link(ticket, link, required=False)
        ticket.result()
        self.previous_global_step = global_step
        if self.rank == 0 and max_ckpt_to_keep:
            _unlink_old(checkpointer.run, Path(local_path), global_step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> None:
        """Restore the checkpoint that `local_path` leads to; verl loads a directory that it wrote itself.

        Raises what `Checkpointer.restore` raises, `NoSuchCheckpoint` if nothing is there, and `InvalidRequest` for
        anything but a checkpoint of this role's run. `del_local_after_load` is ignored: there are no local copies.
        """
        if local_path is None:
            return
        self.close()
        _initialize(self.model)
        run = _run_of(self._run, local_path)
        # separate from the saving one: only a save knows how many checkpoints to keep
        with Checkpointer(run, self._state(), **_chosen(self._options, None)) as checkpointer:
            step = _step(checkpointer, local_path)
            if step is not None:
                checkpointer.restore(step, groups=self._groups(checkpointer, self.checkpoint_load_contents))
                self._restored = step
                return
        own = _OWN(self.model, self.optimizer, self.lr_scheduler, **self._given)
        own.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def close(self) -> None:
        """Disconnect from the daemon; every save is committed already."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _saving(self, local_path: str, keep: int | None) -> Checkpointer:
        run = _run_of(self._run, local_path)
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(run, self._state(), **_chosen(self._options, keep))
            if self._restored is not None:
                self._checkpointer.goes_on_from(self._restored)
        if self._checkpointer.run != run:
            raise InvalidRequest(
                f"this worker saves to run {self._checkpointer.run}, but {local_path} belongs to {run}",
                hint="use one manager per role",
            )
        return self._checkpointer

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model}
        if self.optimizer is not None:
            state["optim"] = self.optimizer
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler
        return state

    def _groups(self, checkpointer: Checkpointer, contents: Any) -> tuple[str, ...] | None:
        """The groups of verl's contents; None for all."""
        wanted = {"model" if name == "hf_model" else str(name) for name in contents}
        if wanted >= set(_GROUPS):
            return None
        if "optimizer" in wanted and self.optimizer is None:
            raise InvalidRequest("contents include the optimizer, but this worker has none")
        return tuple(group for name, group in _GROUPS.items() if name in wanted)

    def _existing(self, step: int) -> Any:
        """An abandoned step is replaced; the same step twice is saved again."""
        return "replace" if step == self.previous_global_step or step == self._restored else "refuse"

    def _assets(self) -> Mapping[str, Any]:
        """Config, generation config and tokenizer, as files beside the weights, so that `from_pretrained` loads them."""
        if self.rank != 0:
            return {}
        from holdfast.state import assets

        inner = getattr(self.model, "_fsdp_wrapped_module", self.model)
        parts = [getattr(inner, "config", None), getattr(inner, "generation_config", None), self.processing_class]
        return assets.collect([part for part in parts if hasattr(part, "save_pretrained")])


def _initialize(model: Any) -> None:
    """FSDP1 initializes its local shards at the first forward, but a restore comes before that."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _lazy_init  # as verl does, too: there is no public way

    if isinstance(model, FullyShardedDataParallel):
        _lazy_init(model, model)


def _chosen(options: Mapping[str, Any], keep: int | None) -> dict[str, Any]:
    """The options, with verl's defaults."""
    chosen = {"policy": "wait", **options}
    if keep:
        chosen.setdefault("keep_last", keep)
    return chosen


def _replace(old: type, new: type) -> None:
    """Replace a class in all of verl's imported modules."""
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and module is not None and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)


def _refuse_config(manager: VerlCheckpoints) -> None:
    for name in (*manager.checkpoint_save_contents, *manager.checkpoint_load_contents):
        if name not in _KNOWN:
            raise InvalidRequest(f"a checkpoint has no {name!r}", hint=f"use only {', '.join(_KNOWN)}")
    config = manager.checkpoint_config
    if config and config.get("async_save", False):
        raise InvalidRequest(
            "async_save=True: verl would not record which step to resume from",
            hint="set async_save to False: a save returns when it is committed",
        )
    if manager.should_save_lora_only:
        raise InvalidRequest(
            "save_lora_only=True is not supported: a checkpoint holds the whole model", hint="leave save_lora_only at False"
        )
    if manager.optimizer is not None and not isinstance(manager.optimizer, torch.optim.Optimizer):
        raise InvalidRequest(f"a {type(manager.optimizer).__name__} is not a torch optimizer, and would not be stored whole")


def _run_of(run: str, local_path: str) -> str:
    """The run of a path's role: run-actor for global_step_7/actor; run for global_step_7 itself."""
    role = Path(local_path).name
    return run if _STEP_FOLDER.fullmatch(role) else naming.check_run(f"{run}-{role}")


def _link(local_path: str) -> Path:
    """The path of a checkpoint's link. verl writes files into a step's folder, which must not be a checkpoint."""
    path = Path(os.path.abspath(local_path))
    return path / _INSIDE if _STEP_FOLDER.fullmatch(path.name) else path


def _is_ours(run: str, path: Path) -> bool:
    return path.is_symlink() and naming.linked_step(run, os.readlink(path)) is not None


def _step(checkpointer: Checkpointer, local_path: str) -> int | None:
    """The step of a path; from its name if it has no link: the root is on another machine, or the link could not be
    made. None if verl wrote what is there.
    """
    link = _link(local_path)
    step = checkpointer.step_at(link) if os.path.lexists(link) else None
    if step is not None:
        return step
    named, local = _STEP_FOLDER.fullmatch(link.parent.name), checkpointer.root() is not None
    number = None if named is None else int(named[1])
    if local and number not in checkpointer.steps():
        number = None
    if any(Path(local_path).glob("*_world_size_*_rank_*.pt")):
        if local and number is not None:
            raise InvalidRequest(
                f"{local_path} was written by verl, and {checkpointer.run}@{number} was saved without a link there",
                hint=f"move {local_path} away to restore {checkpointer.run}@{number}; `holdfast rm` removes that one",
            )
        return None
    if os.path.lexists(link):
        raise InvalidRequest(
            f"{link} is not a checkpoint of {checkpointer.run} in this root",
            hint="call install() with the run that it belongs to, or move it away to restore the step of its folder's name",
        )
    if number is None:
        raise NoSuchCheckpoint(f"there is no checkpoint at {link}", hint="`holdfast ls` lists the checkpoints that exist")
    return number


def _unlink_old(run: str, local_path: Path, step: int, keep: int) -> None:
    """Remove the links of the oldest steps up to this one, so that retention may remove their checkpoints. verl's own
    directories stay.
    """
    link = _link(str(local_path))
    own = link.name  # the same in every step's folder
    links = []
    for folder in link.parent.parent.glob("global_step_*"):
        number = _STEP_FOLDER.fullmatch(folder.name)
        if number is not None and int(number[1]) <= step and _is_ours(run, folder / own):
            links.append((int(number[1]), folder / own))
    unlink(link for _, link in sorted(links)[:-keep])
