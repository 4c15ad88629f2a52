"""A Megatron model with its optimizer and scheduler as the state of a `Checkpointer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.checkpointer import Checkpointer
from holdfast.integrations.megatron import process_state
from holdfast.integrations.megatron.optimizer import MegatronOptimizerByName, members
from holdfast.integrations.megatron.pieces import Stored, empty, read
from holdfast.state.exclusion import OwnPatterns
from holdfast.state.masters import Masters
from holdfast.tensors.fragments import Fragment
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Shape

if TYPE_CHECKING:
    from holdfast.checkpointer_options import Options
    from holdfast.integrations.megatron.names import Names

PROGRESS, EXTRA_STATES = "megatron", "extra_states"  # keys; the first is read before anything else
_ONLY_PROGRESS = OwnPatterns(("extra/[!m]*", "extra/m[!e]*"))
_STREAMS = ("extra/rng", "extra/ranks/*/rng/*", "extra/rng_tracker", "extra/rng_tracker/*")
_SIZES = {
    "tp": "get_tensor_model_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
    "etp": "get_expert_tensor_parallel_world_size",
}


class RestoredPart(NamedTuple):
    """What of a checkpoint is restored: groups and patterns as in `Checkpointer.restore`, and whether random streams are."""

    groups: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    streams: bool = True
    strict: bool = True
    masters: Masters | None = None


class MegatronCheckpoints:
    """Saves and restores one model, with its optimizer and scheduler, in one run.

    `progress` is the training's own JSON values. Construct it on every rank, after the model is built.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any, names: Names) -> None:
        """Raises `InvalidRequest` for everything in the model or optimizer that cannot be stored."""
        from megatron.core.utils import unwrap_model

        self.model, self.optimizer, self.scheduler = list(model), optimizer, scheduler
        _refuse_fsdp(model)
        self._chunks = unwrap_model(list(model))
        self._names = names
        names.check(self._chunks)
        self._now = {"parallel": arrangement(), "names": names.family}
        self.progress: dict[str, Any] = dict(self._now)
        self._state: dict[str, Any] = {}
        self._places: list[int] = []
        self._held: set[int] = set()  # steps that this launch has saved or restored
        _refuse_tied_parts(self._chunks, optimizer)
        self._refresh()

    def check_same(self, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        same = len(model) == len(self.model) and all(a is b for a, b in zip(model, self.model, strict=True))
        if not same or optimizer is not self.optimizer or scheduler is not self.scheduler:
            raise InvalidRequest(
                f"a different model, optimizer or scheduler than before is used with {self.checkpointer.run}",
                hint="train one model per run: use another directory, or close() first",
            )

    def open(self, run: str, options: Options) -> None:
        chosen = options.copy()
        chosen.setdefault("policy", "wait")
        self.checkpointer = Checkpointer(run, self._state, **chosen)

    def save(self, step: int, progress: dict[str, Any], **how: Any) -> SaveTicket:
        """Save the current state; an earlier save or restore of this launch at the same step counts."""
        self._refresh()
        self._says({**self._now, **progress})
        self._note_extra_states()
        ticket = self.checkpointer.save(step, existing="same" if step in self._held else "refuse", **how)
        self._held.add(step)
        return ticket

    def peek(self, step: int | None, foreign: bool = False) -> tuple[int, dict[str, Any] | None] | None:
        """The step that would be restored and its `progress`, without changing model or optimizer.

        With `foreign`, steps of other programs count too; their progress is None.
        """
        try:
            restored_step = self.checkpointer.restore(step, groups=("extra",), exclude=_ONLY_PROGRESS, strict=False)
        except StateMismatch as error:  # no step has a group `extra`: then `best` is the newest of all
            if "best" not in error.members:
                raise
            return self._foreign(error.members["best"], foreign)
        progress = dict(self._state[PROGRESS])
        self._says(self._now)
        report = self.checkpointer.last_restore
        if report is None:
            return None
        if any(name.split("/")[1] == PROGRESS for name in report.missing):
            return self._foreign(restored_step, foreign)
        if progress.get("names") != self._names.family:
            raise StateMismatch(
                f"step {restored_step} of {self.checkpointer.run} has tensor names of {progress.get('names')}, but "
                f"this training uses those of {self._names.family}",
                hint=f"pass names={progress.get('names')!r} to holdfast.integrations.megatron.configure",
            )
        return restored_step, progress

    def _foreign(self, step: int, foreign: bool) -> tuple[int, None]:
        if not foreign:
            raise StateMismatch(
                f"step {step} of {self.checkpointer.run} was not saved by Megatron: it lacks Megatron's counters",
                hint="load weights and optimizer with load_checkpoint(…, strict=False), or the weights with --finetune",
            )
        return step, None

    def restore(self, step: int | None, saved: dict[str, Any], part: RestoredPart) -> int:
        """Restore a step, or the newest that has the wanted part; `saved` is its progress from `peek`. Returns the
        step.

        Sets `progress` to the checkpoint's.
        """
        restored = self._restore(step, saved, part)
        progress = dict(self._state[PROGRESS])
        if "extra" in (part.groups or ("extra",)) and progress["parallel"] != saved["parallel"]:
            restored = self._restore(restored, progress, part)  # another one than `peek` found, and of another layout
        self.progress = self._state[PROGRESS]
        return restored

    def restore_foreign(self, step: int, part: RestoredPart) -> None:
        """Restore weights and optimizer of another program's step, under the same names; nothing of `extra`."""
        self._restore(step, self._now, part._replace(groups=part.groups and ("model",), ignore=("extra/*",), strict=True))

    def _restore(self, step: int | None, saved: dict[str, Any], part: RestoredPart) -> int:
        self._refresh()
        ignored = list(part.ignore)
        if not part.streams or saved["parallel"] != self._now["parallel"]:
            ignored += _STREAMS
        if self.scheduler is None:
            ignored += ["extra/scheduler", "extra/scheduler/*"]
        if "scaler" not in self._state:
            ignored += ["extra/scaler", "extra/scaler/*"]
        self._note_extra_states()
        others = self._of_other_ranks()
        weights = self._state["model"]
        known = {name: shape for name, (shape, _) in others.items() if name not in weights}
        weights.update({name: [empty(shape, others[name][1])] for name, shape in known.items()})
        try:
            if self._by_name is not None:
                self._by_name.others = self._stepped_elsewhere(others)
            restored_step = self.checkpointer.restore(
                step, groups=part.groups, exclude=OwnPatterns(ignored), strict=part.strict, masters=part.masters
            )
        finally:
            for name in known:
                del weights[name]
            if self._by_name is not None:
                self._by_name.others = {}
        process_state.install_extra_states(self._tensors.modules, self._state.get(EXTRA_STATES, {}))
        self._held = {restored_step} if "extra" in (part.groups or ("extra",)) else set()  # else it is finetuned
        return restored_step

    def _says(self, progress: dict[str, Any]) -> None:
        self.progress.clear()
        self.progress.update(progress)
        self._state[PROGRESS] = self.progress

    def _refresh(self) -> None:
        """Read model and optimizer again, unless all parameters are unchanged."""
        held = [tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        places = [tensor.data_ptr() for tensor in held]
        if places == self._places:
            return
        self._tensors = self._names.renamed(read(self._chunks))
        weights: dict[str, list[Fragment]] = {}
        buffers: dict[str, list[Fragment]] = {}
        for stored in self._tensors.tensors:
            _add(weights if isinstance(stored.tensor, torch.nn.Parameter) else buffers, stored)
        self._state.clear()
        self._state.update({"model": weights, PROGRESS: self.progress, "rng_tracker": process_state.TrackedStreams()})
        if buffers:
            self._state["buffers"] = buffers
        self._by_name = None
        if self.optimizer is not None:
            self._by_name = MegatronOptimizerByName(self.optimizer, self._tensors.tensors)
            self._state["optim"] = self._by_name.shards()
            if process_state.loss_scales(self.optimizer):
                self._state["scaler"] = process_state.LossScales(self.optimizer)
        if self.scheduler is not None:
            self._state["scheduler"] = process_state.SchedulerSteps(self.scheduler)
        self._places = places

    def _note_extra_states(self) -> None:
        """Put the current extra state of modules into the state; it is small, and may be new objects each time."""
        self._state.pop(EXTRA_STATES, None)
        tensors = process_state.extra_states(self._tensors.modules)
        if tensors:
            self._state[EXTRA_STATES] = tensors

    def _of_other_ranks(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of all ranks' parameters, by stored name. A collective."""
        own = {name: (parts[0].shape, parts[0].dtype) for name, parts in self._state["model"].items()}
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return own
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, own)
        return {name: about for one in gathered for name, about in one.items()}

    def _stepped_elsewhere(self, known: dict[str, tuple[Shape, torch.dtype]]) -> dict[str, Shape]:
        assert self._by_name is not None
        own = {name for one in self._by_name.trained for name in one.names}
        return {name: shape for name, (shape, _) in known.items() if name not in own}


def arrangement() -> dict[str, int]:
    """The sizes of Megatron's parallel groups, and of the world."""
    from megatron.core import parallel_state

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return {"world": world, **{name: int(getattr(parallel_state, about)()) for name, about in _SIZES.items()}}


def _add(group: dict[str, list[Fragment]], stored: Stored) -> None:
    by_name: dict[str, list[Fragment]] = {}
    for piece in stored.pieces:
        by_name.setdefault(piece.name, []).append(piece.of(stored.tensor))
    for name, parts in by_name.items():
        if name in group:
            raise InvalidRequest(
                f"two tensors of the model on this rank would be stored as {name!r}, one of them {stored.own!r}",
                hint="give the modules their own names in sharded_state_dict()",
            )
        group[name] = parts


def _refuse_fsdp(model: Sequence[Any]) -> None:
    """Refuse wrappers that shard the parameters themselves; `unwrap_model` would remove them."""
    for chunk in model:
        wrapper = chunk
        while isinstance(wrapper, torch.nn.Module):
            if "FullyShardedDataParallel" in type(wrapper).__name__:
                raise InvalidRequest(
                    f"{type(wrapper).__module__}.{type(wrapper).__name__} is not supported",
                    hint="use the distributed optimizer; or torch's fully_shard in your own loop, with Checkpointer",
                )
            wrapper = getattr(wrapper, "module", None)


def _refuse_tied_parts(chunks: Sequence[Any], optimizer: Any) -> None:
    """Refuse embeddings on two pipeline stages, which their distributed optimizers cut in different places."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or optimizer is None:
        return
    split = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    cut = split and any(isinstance(one, DistributedOptimizer) for one in members(optimizer))
    if cut and any(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in chunks):
        raise InvalidRequest(
            "the first and the last pipeline stage share their embeddings, and the distributed optimizer splits "
            "them at different places on each stage, so their parts cannot be stored as one tensor",
            hint="train with --untie-embeddings-and-output-weights, or without the distributed optimizer",
        )
