"""Saves and restores a DeepSpeed engine, in place of its own `save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.deepspeed.optimizer import PartitionedOptimizer
from holdfast.integrations.deepspeed.partitions import stage_3_part, units, whole_shape
from holdfast.integrations.deepspeed.refusals import PARTITIONED, STAGE_3, check
from holdfast.state.exclusion import OwnPatterns
from holdfast.state.modules import module_state, parameter_names
from holdfast.state.named import Named
from holdfast.tensors.fragments import Fragment
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

log = logging.getLogger(__name__)

PROGRESS, SCHEDULER, SCALER = "deepspeed", "scheduler", "scaler"  # keys of the state
LATEST = "latest"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_OWN = frozenset({"model", "optim", PROGRESS, SCHEDULER, SCALER})


class LoadRequest(NamedTuple):
    """Arguments of `load_checkpoint` that select a part."""

    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool


class EngineProgress:
    """The engine's counters, its loss scale and the user's `client_state`, as an entry of the state."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.client_state: dict[str, Any] = {}
        self.tag = ""
        self.how = LoadRequest(True, True, True, False)

    def state_dict(self) -> dict[str, Any]:
        counters = {name: getattr(self._engine, name) for name in COUNTERS}
        return {"counters": counters, "loss_scale": self._scale(), "tag": self.tag, "client_state": self.client_state}

    def load_state_dict(self, document: Mapping[str, Any]) -> None:
        self.tag, self.client_state = document["tag"], document["client_state"]
        if self.how.module_only:
            return
        for name, value in document["counters"].items():
            setattr(self._engine, name, value)
        if self.how.optimizer:
            holder = self._holder()
            for name in self._scale().keys() & document["loss_scale"].keys():
                setattr(holder, name, document["loss_scale"][name])

    def _holder(self) -> Any:
        """The object that has the loss scale, if any."""
        optimizer = self._engine.optimizer
        return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)

    def _scale(self) -> dict[str, Any]:
        held = vars(self._holder()) if self._holder() is not None else {}
        return {name: value for name, value in held.items() if type(value) in (bool, int, float)}


class AttachedEngine:
    """An engine and its `Checkpointer`, which the first save or restore makes."""

    def __init__(self, engine: Any, run: str, state: Mapping[str, Any], frozen: bool, options: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` for an unsupported engine."""
        check(engine)
        taken = sorted(_OWN & state.keys())
        if taken:
            raise InvalidRequest(f"state= of attach() has the key {taken[0]!r}, which the engine itself stores")
        self._engine, self._frozen = engine, frozen
        self._kind = type(engine.optimizer).__name__
        self._parts: dict[str, Fragment] = {}
        self._progress = EngineProgress(engine)
        self._optimizer = self._partitioned() if self._kind in PARTITIONED else None
        self._state = {**self._entries(), **state}
        config = getattr(engine.module, "config", None)
        assets = [config] if hasattr(config, "save_pretrained") else None
        at = os.fspath(options.get("at") or "")
        self._has_links = not at.startswith(("http://", "https://"))
        self._root = Path(os.path.realpath(at)) if at and self._has_links else None
        self.checkpointer = Checkpointer(run, self._state, **{"policy": "wait", "assets": assets, **options})
        self._saved: dict[int, tuple[str, str]] = {}  # step -> tag and client_state of this launch's saves
        self._restored = False
        atexit.register(_close, weakref.ref(self.checkpointer))

    def _refuse_accumulated(self) -> None:
        """Refuse accumulated gradients, which no checkpoint contains."""
        engine = self._engine
        is_gradient_accumulation_boundary = (
            engine._is_gradient_accumulation_boundary
        )  # by set_gradient_accumulation_boundary(); None: they are counted
        accumulated = engine.micro_steps % engine.gradient_accumulation_steps()
        if is_gradient_accumulation_boundary is False or (is_gradient_accumulation_boundary is None and accumulated):
            which = (
                f"{accumulated} micro-batches of {engine.gradient_accumulation_steps()}"
                if is_gradient_accumulation_boundary is None
                else "micro-batches"
            )
            raise InvalidRequest(
                f"save_checkpoint() was called during gradient accumulation: the gradients of {which} would be lost",
                hint="save only if engine.is_gradient_accumulation_boundary() was true at the last engine.step()",
            )

    def save(self, save_dir: str, tag: Any, client_state: Mapping[str, Any], save_latest: bool) -> None:
        """Save the engine, and link `save_dir/tag` to the checkpoint."""
        engine = self._engine
        self._refuse_accumulated()
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        path = _path(save_dir, tag)
        if self._root is not None and Path(os.path.realpath(path.parent)).is_relative_to(self._root):
            raise InvalidRequest(
                f"{save_dir} is inside {self._root}, Holdfast's own directory, where links are not allowed",
                hint="save to a directory outside at=",
            )
        step = engine.global_steps
        self._progress.tag, self._progress.client_state = tag, dict(client_state)
        before = self._saved.get(step)
        state_text = _told(client_state)
        existing = "refuse" if before is None and not self._restored else "replace"
        if before is not None and before[0] != tag:
            if before[1] != state_text:
                raise InvalidRequest(
                    f"step {step} is already saved as {before[0]!r} with another client_state, and a step has only "
                    "one checkpoint",
                    hint="use the same tag, or take another step before the next save",
                )
            existing = "same"
        ticket = self.checkpointer.save(step, existing=existing)  # type: ignore[arg-type]
        self._saved[step] = (tag, state_text)
        if self._has_links and engine.global_rank == 0:
            self.checkpointer.link(ticket, path, required=False)
            if save_latest and naming.linked_step(self.checkpointer.run, os.path.realpath(path)) == step:
                _point(Path(save_dir, LATEST), tag)

    def load(self, step: int | None, how: LoadRequest) -> int:
        """Restore a step, or the newest one; returns it, or 0 if there is none."""
        engine, optimizer = self._engine, self._engine.optimizer
        self._progress.how = how
        if hasattr(optimizer, "checkpoint_event_prologue"):  # ZeRO-3 lets go of parameters that it has gathered
            optimizer.checkpoint_event_prologue()
        restored = self._restore(step, how)
        if self._optimizer is not None:
            self._optimizer.follow_weights()
        if hasattr(optimizer, "checkpoint_event_epilogue"):  # and gathers those again that it always has as a whole
            optimizer.checkpoint_event_epilogue()
        if restored:
            self._restored, self._saved = True, {}
            if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state") and optimizer.optimizer.state:
                optimizer._lazy_init_hp_params_optimizer_state()  # so that DeepSpeed's own accessors see the moments
            missing = self.checkpointer.last_restore.missing if self.checkpointer.last_restore else ()
            if f"extra/{PROGRESS}" in missing and not how.module_only:  # saved without an engine: the step counts
                engine.global_steps, engine.global_samples = restored, restored * engine.train_batch_size()
        return restored

    @property
    def client_state(self) -> dict[str, Any]:
        """The client state of the last save or restore."""
        return self._progress.client_state

    def path(self, load_dir: str, tag: Any, step: int) -> str:
        """The path to return for a restored step: its link, else the directory and tag of its save."""
        return str(Path(load_dir, str(tag or self._progress.tag or f"global_step{step}")))

    def check_frozen(self, excluded: bool) -> None:
        """`InvalidRequest` if one save leaves out what the others have."""
        if excluded and self._frozen:
            raise InvalidRequest(
                "save_checkpoint(exclude_frozen_parameters=True): frozen parameters must be left out of "
                "either all checkpoints of a run or none of them",
                hint="use attach(…, frozen=False), or install(…, frozen=False)",
            )

    def _restore(self, step: int | None, how: LoadRequest) -> int:
        strict = how.strict
        if not how.module_only:
            left_out = [] if how.optimizer else ["optim/*", "master/*"]
            left_out += [] if how.scheduler else [f"extra/{SCHEDULER}"]
            if not strict and self._is_foreign(step, how):
                left_out += [f"extra/{key}{more}" for key in (SCHEDULER, SCALER) for more in ("", "/*")]
            return self.checkpointer.restore(
                step, exclude=OwnPatterns(left_out), strict=strict, masters=None if how.optimizer else "from-model"
            )
        return self.checkpointer.restore(
            step, groups=("model", "extra"), exclude=self._all_but_progress(), strict=strict, masters="from-model"
        )

    def _is_foreign(self, step: int | None, how: LoadRequest) -> bool:
        """Whether another program saved the step, whose scheduler is not the engine's."""
        self._progress.how = how._replace(module_only=True)  # counters stay as they are until everything is restored
        restored_step = self.checkpointer.restore(step, groups=("extra",), exclude=self._all_but_progress(), strict=False)
        self._progress.how = how
        report = self.checkpointer.last_restore
        return bool(restored_step) and report is not None and f"extra/{PROGRESS}" in report.missing

    def _all_but_progress(self) -> OwnPatterns:
        """Patterns of this state's group `extra` except the engine's counters."""
        rest = [key for key in self._state if key not in ("model", "optim", PROGRESS)]
        return OwnPatterns(("extra/rng", *(f"extra/{key}{more}" for key in rest for more in ("", "/*"))))

    def _entries(self) -> dict[str, Any]:
        engine = self._engine
        shards = self._shard if self._kind == STAGE_3 else None
        only = None if self._frozen else self._trained()
        plain = shards is None and only is None
        state: dict[str, Any] = {"model": engine.module if plain else Named(engine.module, only=only, shards=shards)}
        state["optim"] = engine.optimizer if self._optimizer is None else self._optimizer.entry
        state[PROGRESS] = self._progress
        scheduler = engine.lr_scheduler
        if scheduler is not None:
            if not all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict")):
                raise InvalidRequest(
                    f"the learning rate scheduler {type(scheduler).__name__} has no state_dict, so it cannot be saved"
                )
            state[SCHEDULER] = scheduler
        scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        if scaler is None:  # without ZeRO the engine has it itself (0.19)
            scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
        if scaler is not None:
            state[SCALER] = scaler
        return state

    def _partitioned(self) -> PartitionedOptimizer:
        optimizer = self._engine.optimizer
        names_by_id = parameter_names(module_state(self._engine.module, "model").tensors)
        names = {identity: name for identity, (name, _) in names_by_id.items()}
        return PartitionedOptimizer(units(optimizer, names), optimizer.optimizer)

    def _trained(self) -> Any:
        tensors = module_state(self._engine.module, "model").tensors
        kept = {name for name, value in tensors.items() if not isinstance(value, torch.nn.Parameter) or value.requires_grad}
        return lambda name: name in kept

    def _shard(self, name: str, value: Any) -> Any:
        """This rank's part of a parameter that ZeRO-3 partitions; the same Fragment while its memory stays the same."""
        if not hasattr(value, "ds_id"):
            return value
        known = self._parts.get(name)
        memory = value.ds_tensor.data_ptr()
        if known is None or (known.tensor.numel() and known.tensor.data_ptr() != memory):
            start, count, local = stage_3_part(value)
            local = local if count else torch.empty(0, dtype=local.dtype)
            known = self._parts[name] = Fragment(local, whole_shape(value), flat=(start, start + count))
        return known


def wanted_step(attached: AttachedEngine, load_dir: str, tag: Any) -> int | None:
    """The step of a directory and a tag; None for the newest one.

    Without a tag this is the newest step, unless the run has newer ones in other directories. It does not depend on
    running commits, so all ranks agree.
    """
    if tag is None:
        latest = Path(load_dir, LATEST)
        tag = latest.read_text().strip() if latest.is_file() else None
        target = None if tag is None else os.path.realpath(Path(load_dir, tag))
        step = None if target is None else _step_of_run(attached, target)
        if step is None or target is None:
            return None
        beside = [naming.parse_step_directory(path.name) for path in Path(target).parent.glob("*")]
        return step if any(other is not None and other > step for other in beside) else None
    path = _path(load_dir, str(tag))
    if path.exists() and not path.is_symlink():
        raise InvalidRequest(
            f"{path} exists and is not a link to a checkpoint of Holdfast", hint="use another tag or directory, or remove it"
        )
    step = _step_of_run(attached, os.path.realpath(path))
    return _number(str(tag)) if step is None else step


def _step_of_run(attached: AttachedEngine, place: str) -> int | None:
    """The step at this path, None if it is no checkpoint; `InvalidRequest` for one of another root."""
    step = naming.linked_step(attached.checkpointer.run, place)
    if step is not None and os.path.isdir(place) and attached.checkpointer.step_at(place) is None:
        raise InvalidRequest(
            f"{place} belongs to a root other than this engine's",
            hint="attach with that root as at=, or import the checkpoint with `holdfast import`",
        )
    return step


def is_deepspeeds(run: str, load_dir: str, tag: Any) -> bool:
    """Whether a directory has a checkpoint that DeepSpeed itself wrote under this tag, or as its latest."""
    if tag is None:
        latest = Path(load_dir, LATEST)
        tag = latest.read_text().strip() if latest.is_file() else ""
    path = Path(load_dir, str(tag))
    return bool(tag) and path.is_dir() and naming.linked_step(run, os.path.realpath(path)) is None


def _path(directory: str, tag: str) -> Path:
    if not tag or ".." in Path(tag).parts or Path(tag).is_absolute():
        raise InvalidRequest(f"the tag {tag!r} is not the name of a directory below {directory!r}")
    return Path(directory, tag)


def _point(latest: Path, tag: str) -> None:
    """Let DeepSpeed's file name a tag that is linked; a warning if the file cannot be written."""
    try:
        latest.write_text(tag)
    except OSError as error:
        log.warning("%s does not name the tag %s: %s", latest, tag, error.strerror)


def _number(tag: str) -> int:
    """The number at the end of a tag without a link."""
    match = re.search(r"(\d+)$", tag)
    if match is None:
        raise InvalidRequest(f"the tag {tag!r} has no link to a checkpoint and does not end in a step number")
    return int(match[1])


def _told(client_state: Mapping[str, Any]) -> str:
    return json.dumps(client_state, sort_keys=True, default=lambda value: f"{id(value)}")


def _close(checkpointer: weakref.ref[Checkpointer]) -> None:
    held = checkpointer()
    if held is not None:
        held.close()
