"""Accelerate: `save_state()` and `load_state()` of an `Accelerator` go to Holdfast.

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    attach(accelerator, "llama3-8b", at="/fast/checkpoints")

    steps = accelerator.load_state()                  # the newest checkpoint; 0 if there is none yet
    accelerator.save_state("outputs/step_500")        # returns at once; "outputs/step_500" is a link

Everything that is prepared or registered is stored. What each loader needs to go on with the same rows and random numbers
is in `loader_positions`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.loader_positions import LoaderPosition
from holdfast.integrations.replaced_method import ReplacedMethod
from holdfast.link.checkpoint_links import unlink
from holdfast.stage.save_request import Wait
from holdfast.state import optimizer_wrappers
from holdfast.tickets import SaveTicket, settle
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.lineage import Existing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options

_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
_ELSEWHERE = {"DEEPSPEED": "use holdfast.integrations.deepspeed.attach(engine, …)"}
_REPLACED = ("save_state", "load_state", "skip_first_batches", "end_training", "free_memory")
_NUMBER = re.compile(r"(\d+)(?=\D*$)")


def attach(accelerator: Any, run: str, **options: Unpack[Options]) -> AcceleratorCheckpoints:
    """Make `accelerator` save to and load from the run. Call it after `prepare()`, on every process.

    `options` are those of `Checkpointer`; `policy` is "wait", so that no save is dropped, and `keep_last` is the
    project's `total_limit`, unless the options set them. From then on

    -   `save_state(output_dir)` saves and returns at once. The step is the number of optimizer steps, or `step=`;
        `metrics=` and `wait=` are those of `Checkpointer.save`. `output_dir` becomes a link to the checkpoint, where the
        daemon is on this machine.
    -   `load_state()` restores the newest checkpoint, `load_state(500)` that step, `load_state(directory)` the checkpoint
        that a directory is or leads to; directories that accelerate wrote itself are loaded by accelerate. It returns the
        step.
    -   `skip_first_batches(loader, n)` continues with the epoch and random numbers of the save.
    -   `end_training()` completes every save. `free_memory()` does too, and detaches: attach again after another
        `prepare()`.

    Raises `InvalidRequest` if nothing is prepared, for unsupported distributed types, and for registered hooks or
    loaders that Holdfast cannot store.
    """
    if isinstance(getattr(accelerator, "holdfast", None), AcceleratorCheckpoints):
        raise InvalidRequest("this Accelerator is attached already", hint="attach each Accelerator once")
    return AcceleratorCheckpoints(accelerator, run, options)


class AcceleratorCheckpoints:
    """Replaces an accelerator's own checkpoints; `accelerator.holdfast`."""

    def __init__(self, accelerator: Any, run: str, options: Options) -> None:
        self._accelerator = accelerator
        self._own = {name: getattr(accelerator, name) for name in _REPLACED}
        self._loaders: list[LoaderPosition] = []
        self._steps: dict[int, int] = {}  # taken by each optimizer in this process, by its identity
        self._before = 0  # optimizer steps of the restored checkpoint
        self._held = -1  # the step that was saved or restored last
        self._state: dict[str, Any] = {}
        self._refresh()
        chosen = _chosen(accelerator, options)
        at = chosen.get("at")
        self._linkable = not str(at).startswith(("http://", "https://"))
        self.checkpointer = Checkpointer(run, self._state, **chosen)
        self.ticket: SaveTicket | None = None
        accelerator.holdfast = self
        for name, own in self._own.items():
            setattr(accelerator, name, ReplacedMethod(own, getattr(self, name)))

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer, including those before a restore; of several optimizers, the largest number."""
        return self._before + max(self._steps.values(), default=0)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        step: SupportsIndex | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: Wait | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path | None:
        """Save everything; returns the directory of the link, if there is one. Raises what `Checkpointer.save` raises.

        Raises `InvalidRequest` during an accumulation of gradients, which no checkpoint contains.
        """
        _refuse_arguments("save_state", save_model_func_kwargs)
        self._refuse_hooks(self._accelerator._save_model_state_pre_hook, "register_save_state_pre_hook")
        if not self._accelerator.gradient_state.sync_gradients:
            raise InvalidRequest(
                "save_state() was called during gradient accumulation, and accumulated gradients are not saved",
                hint="save where accelerator.sync_gradients is true",
            )
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = Path(self._accelerator.project_dir, "checkpoints", f"checkpoint_{project.iteration}")
            self._make_room(output_dir.parent, project.total_limit)
        project.iteration += 1  # of the next save, also of a training that goes on from this one
        number = self.optimizer_steps if step is None else int(step.__index__())
        self._refresh()
        existing: Existing = "refuse"
        if number == self._held:  # without a step in between: the state may differ nevertheless, so it is saved again
            existing = "replace"
            if self.ticket is not None:
                settle(self.ticket)
        self.ticket = self.checkpointer.save(number, metrics=metrics, wait=wait, existing=existing)
        self._held = number
        if output_dir is None or not self._linkable:
            return None
        if self._accelerator.is_main_process:
            self.checkpointer.link(self.ticket, output_dir, required=False)
        return Path(output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | SupportsIndex | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> int | None:
        """Restore the newest checkpoint, or this one, and return its step; 0 if there is none yet.

        accelerate loads directories that it wrote itself; the result is None then. Raises what `Checkpointer.restore`
        raises, and `InvalidRequest` for a checkpoint of another run or root.
        """
        wanted = self._wanted(input_dir)
        if isinstance(wanted, Path):
            self._own["load_state"](str(wanted), load_kwargs, **load_model_func_kwargs)
            return None
        strict = load_model_func_kwargs.pop("strict", True)
        load_model_func_kwargs.pop("map_location", None)  # tensors are restored where they are
        _refuse_arguments("load_state", load_model_func_kwargs)
        self._refuse_hooks(self._accelerator._load_model_state_pre_hook, "register_load_state_pre_hook")
        self._refresh()
        restored = self.checkpointer.restore(wanted, strict=bool(strict))
        if wanted is None and not restored and self._has_old_checkpoints():
            self._own["load_state"](None, load_kwargs)
            return None
        if restored or self.checkpointer.last_restore is not None:
            counts = self._state["accelerate"]
            self._accelerator.step = counts["step"]
            if "iteration" in counts:
                self._accelerator.project_configuration.iteration = counts["iteration"]
            else:  # accelerate's own files have neither this count nor positions
                for loader in self._loaders:
                    loader.imported()
            self._before, self._steps = counts.get("optimizer_steps", restored), dict.fromkeys(self._steps, 0)
            self._held = restored
        return restored

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader without its first batches, as accelerate makes it, with the random numbers of the save."""
        position = next((one for one in self._loaders if one.prepared is dataloader), None)
        if position is not None and num_batches and getattr(dataloader, "use_stateful_dataloader", False):
            raise InvalidRequest(
                "a StatefulDataLoader continues where it was: skip_first_batches() would skip the batches twice",
                hint="iterate over the loader itself",
            )
        loader = self._own["skip_first_batches"](dataloader, num_batches)
        if position is not None:
            position.skipping(loader, num_batches)
        return loader

    def end_training(self) -> None:
        """Complete every save, then end as accelerate does."""
        self.close()
        self._own["end_training"]()

    def free_memory(self, *objects: Any) -> Any:
        """Complete every save, detach, and release memory as accelerate does. Attach again for another training."""
        try:
            self.close()
        finally:
            for name in (*_REPLACED, "holdfast"):
                vars(self._accelerator).pop(name, None)
            self._state.clear()
            self._loaders.clear()
            self._steps.clear()
            released = self._own["free_memory"](*objects)
        return released

    def close(self) -> None:
        """Complete every save. Raises the error of a failed one that was not reported yet."""
        self.checkpointer.close()

    def _has_old_checkpoints(self) -> bool:
        """Whether accelerate itself wrote checkpoints under automatic names before it was attached."""
        project = self._accelerator.project_configuration
        place = Path(self._accelerator.project_dir or "", "checkpoints")
        return bool(project.automatic_checkpoint_naming and place.is_dir()) and any(
            path.is_dir() and not path.is_symlink() for path in place.iterdir()
        )

    def _wanted(self, input_dir: str | os.PathLike[str] | SupportsIndex | None) -> int | Path | None:
        """The step to restore, None for the newest; a path if the checkpoint is accelerate's own."""
        if input_dir is None:
            return None
        if not isinstance(input_dir, str | os.PathLike):
            return int(input_dir.__index__())
        path = Path(os.path.expanduser(input_dir))
        step = self.checkpointer.step_at(path)
        if step is not None:
            return step
        if (path / "COMMIT").exists() and (path / "manifest.json").exists():
            raise InvalidRequest(
                f"{path} is a checkpoint of a run or root other than {self.checkpointer.run}",
                hint="attach to that run, or load parts of it with holdfast.open_checkpoint",
            )
        return path

    def _refresh(self) -> None:
        """Put everything prepared or registered so far into the state."""
        accelerator = self._accelerator
        kind = getattr(accelerator.distributed_type, "name", str(accelerator.distributed_type))
        if kind not in _DISTRIBUTED:
            raise InvalidRequest(
                f"an Accelerator of the distributed type {kind} is not supported",
                hint=_ELSEWHERE.get(kind, f"supported types are {', '.join(_DISTRIBUTED)}"),
            )
        if not accelerator._models:
            raise InvalidRequest("the Accelerator has no model yet", hint="attach after accelerator.prepare(…)")
        known = {id(one.prepared): one for one in self._loaders}
        self._loaders = [known.get(id(loader)) or LoaderPosition(loader) for loader in accelerator._dataloaders]
        parts: dict[str, Any] = {}
        _number(parts, "model", accelerator._models)
        if accelerator._optimizers:
            parts["optim"] = list(accelerator._optimizers)
        _number(parts, "scheduler", accelerator._schedulers)
        _number(parts, "loader", self._loaders)
        _number(parts, "registered", accelerator._custom_objects)
        if accelerator.scaler is not None:
            parts["scaler"] = accelerator.scaler
        self._count_steps(parts)
        parts["accelerate"] = {
            "step": accelerator.step,
            "iteration": accelerator.project_configuration.iteration,
            "optimizer_steps": self.optimizer_steps,
        }
        self._state.clear()
        self._state.update(parts)

    def _count_steps(self, parts: Mapping[str, Any]) -> None:
        for optimizer in optimizer_wrappers.innermost(parts):
            if id(optimizer) not in self._steps:
                self._steps[id(optimizer)] = 0
                optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._steps[id(optimizer)] += 1

    def _refuse_hooks(self, hooks: Mapping[Any, Any], name: str) -> None:
        if hooks:
            raise InvalidRequest(
                f"{len(hooks)} hooks of {name} would write or read files that are not in the checkpoint",
                hint="remove the hooks, since all prepared models are stored whole; register other objects with "
                "accelerator.register_for_checkpointing()",
            )

    def _make_room(self, directory: Path, limit: int | None) -> None:
        """Remove the oldest links of automatic names beyond the limit; accelerate's own checkpoints stay."""
        if limit is None or not self._accelerator.is_main_process or not directory.is_dir():
            return
        linked = [path for path in directory.iterdir() if path.is_symlink()]
        numbered = [(int(match[1]), path) for path in linked if (match := _NUMBER.search(path.name))]
        oldest = [path for _, path in sorted(numbered)[: max(len(numbered) + 1 - limit, 0)]]
        unlink(path for path in oldest if naming.linked_step(self.checkpointer.run, os.readlink(path)) is not None)


def _chosen(accelerator: Any, options: Options) -> Options:
    """The options, with defaults from the project."""
    chosen = options.copy()
    chosen.setdefault("policy", "wait")
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        chosen.setdefault("keep_last", project.total_limit)
    config = getattr(accelerator.unwrap_model(accelerator._models[0]), "config", None)
    if hasattr(config, "save_pretrained"):
        chosen.setdefault("assets", [config])
    return chosen


def _number(parts: dict[str, Any], name: str, entries: Any) -> None:
    for index, entry in enumerate(entries):
        parts[name if index == 0 else f"{name}_{index}"] = entry


def _refuse_arguments(name: str, given: Mapping[str, Any]) -> None:
    if given:
        raise InvalidRequest(f"{name}() got {', '.join(given)}, which Holdfast does not support", hint="leave them out")
