"""Puts the entries of a Megatron-core checkpoint (torch_dist) where a Checkpointer would, under Megatron's own names.

    key                                              becomes
    decoder.layers.self_attention… [layers, …]       decoder.layers.0.self_attention…, and so on: one tensor for each layer
    ….mlp.experts.experts.… [experts, …]             ….mlp.experts.0.experts.…, and so on
    optimizer.state.exp_avg.NAME, and exp_avg_sq     group optim, NAME/exp_avg
    optimizer.state.fp32_param.NAME, or param        group master, NAME
    …/shard_3_16 (extra states, random streams)      documents of the group extra
    common.pt, common_state                          the document `common`; the optimizer's step from it

The names are those that `holdfast.integrations.megatron` stores. NeMo puts `module.` or `model.` before them, which is left
away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state, reading
from holdfast_formats.mapping.listing import ForeignPiece
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import json_values
from holdfast_service.wings.convert.foreign.computed import Number
from holdfast_service.wings.convert.foreign.dcp.arrangement import EXTRA, MODEL
from holdfast_service.wings.convert.foreign.dcp.gathering import PLAIN, GatheredListing, Unread, ValuePlace
from holdfast_service.wings.convert.foreign.dcp.metadata import SavedState
from holdfast_service.wings.convert.foreign.dcp.payloads import Payloads
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord

# What Megatron's own loader allows in `common`, besides tensors.
ALLOWED = PLAIN | frozenset(
    (
        *(f"pathlib.{name}" for name in ("PosixPath", "WindowsPath")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "WindowsPath")),
        "signal.Signals",
        "megatron.core.enums.ModelType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
        *(
            f"megatron.core.transformer.enums.{name}"
            for name in ("AttnBackend", "CudaGraphScope", "AttnMaskType", "LayerType")
        ),
    )
)
COMMON_KEY = "common_state/shard_0_1"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[A-Za-z0-9_]+)\.(?P<name>.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_MASTERS = ("fp32_param", "param", "master_param")
_MASTER_KEY = "master_param"  # as the trainer's library calls Megatron's copies
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<at>[\d.]+_[\d.]+)")
_STACKED_LAYERS = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<after>(?!\d+\.).+)")
_STACKED_EXPERTS = re.compile(r"(?P<before>.*\.experts)\.(?P<after>experts\..+)")
_PREFIXES = ("module.", "model.")
_DEPTH_MAX = 6


class MegatronArrangement:
    """Arranges one saved state dict. `common` is the content of common.pt, or of `common_file`, if there is one."""

    def __init__(
        self, saved: SavedState, payloads: Payloads, gathered: GatheredListing, common: Any = None, common_file: str = ""
    ) -> None:
        self._saved, self._payloads, self._gathered = saved, payloads, gathered
        self._common_value, self._common_file = common, common_file
        self._layers: dict[str, int] = {}
        self._stepped: list[str] = []
        self._mastered: list[str] = []
        self._steps: set[float] = set()
        names = [fqn for fqn in saved.tensors if not _BUFFERS.match(fqn)]
        self._prefix = next((one for one in _PREFIXES if names and all(name.startswith(one) for name in names)), "")

    def arrange(self) -> int | None:
        """Put everything into the gathered listing. Returns the iteration, if `common` has it."""
        for fqn in self._saved.tensors:
            self._tensor(fqn)
        if not any(key.group == MODEL for key in self._gathered.tensors):
            raise StateMismatch(
                "it has no weights: all keys belong to the optimizer", hint="import all keys unchanged with --as-is"
            )
        self._objects()
        iteration = self._common()
        self._optimizer()
        return iteration

    def as_is(self) -> int | None:
        """List every tensor under its own key as a model's, and every object under its own key."""
        for fqn, saved in self._saved.tensors.items():
            spec = TensorSpec(MODEL, fqn, saved.dtype, self._payloads.shape(saved))
            self._gathered.add(spec, self._payloads.pieces(saved))
        self._objects()
        return self._common()

    def _tensor(self, fqn: str) -> None:
        saved = self._saved.tensors[fqn]
        shape, pieces = self._payloads.shape(saved), self._payloads.pieces(saved)
        match = _STATE.fullmatch(fqn)
        if match is None and _BUFFERS.match(fqn):
            note = "buffers of the distributed optimizer do not name their weights and are kept unchanged in group extra"
            if note not in self._gathered.notes:
                self._gathered.notes.append(note)
            self._gathered.add(TensorSpec(EXTRA, fqn, saved.dtype, shape), pieces)
            return
        name = (fqn if match is None else match["name"]).removeprefix(self._prefix)
        for single, part_shape, part in self._unstacked(name, shape, pieces, saved.dtype):
            group, stored = MODEL, single
            if match is not None and match["kind"] in _MASTERS:
                group = optimizer_state.MASTER_GROUP
                self._mastered.append(single)
            elif match is not None:
                group, stored = optimizer_state.GROUP, f"{single}/{match['kind']}"
                self._stepped.append(single)
            self._gathered.add(TensorSpec(group, stored, saved.dtype, part_shape), part)

    def _unstacked(
        self, name: str, shape: Shape, pieces: tuple[ForeignPiece, ...], dtype: str
    ) -> Iterator[tuple[str, Shape, tuple[ForeignPiece, ...]]]:
        """Split a tensor of all layers and experts into single ones."""
        match = _STACKED_LAYERS.fullmatch(name)
        if match is not None and shape:
            count = self._layers.setdefault(match["before"], shape[0])
            if shape[0] != count:
                text = f"{name!r} has {shape[0]} layers, but other tensors below {match['before']!r} have {count}"
                raise StateMismatch(text, tensor=name)
            for layer, part in enumerate(_split(pieces, count, dtypes.bits(dtype) // 8)):
                yield from self._unstacked(f"{match['before']}.{layer}.{match['after']}", shape[1:], part, dtype)
            return
        match = _STACKED_EXPERTS.fullmatch(name)
        if match is not None and len(shape) == (2 if name.endswith("bias") else 3):
            for expert, part in enumerate(_split(pieces, shape[0], dtypes.bits(dtype) // 8)):
                yield f"{match['before']}.{expert}.{match['after']}", shape[1:], part
            return
        yield name, shape, pieces

    def _objects(self) -> None:
        """Objects of single ranks: by the key before `/shard_…`, then by place and number."""
        held: dict[str, dict[str, Any]] = {}
        empty = 0
        for fqn, at in self._saved.values.items():
            if fqn == COMMON_KEY and self._common_value is None:
                found = self._gathered.value(at)
                self._common_value = found[0] if isinstance(found, list) and found else found
                self._common_file = at.file
                continue
            value = self._gathered.value(at)
            if _is_empty(value):
                empty += 1
                continue
            self._note_steps(value)
            match = _OBJECT.fullmatch(fqn)
            key, place = (match["key"], match["at"]) if match is not None else (fqn, "")
            encoded = self._gathered.json(value, ValuePlace(at.file, EXTRA, f"{key}/{place}".rstrip("/")))
            if isinstance(encoded, Unread):
                self._gathered.notes.append(f"{fqn} was left out: {encoded.reason}")
            else:
                held.setdefault(key, {})[place] = encoded
        for key, places in held.items():
            document = places[""] if list(places) == [""] else json_values.ordered(dict(sorted(places.items())))
            self._gathered.document(EXTRA, key, document)
        if empty:
            self._gathered.notes.append(f"{empty} empty extra states were skipped")

    def _common(self) -> int | None:
        value, place = self._common_value, ValuePlace(self._common_file, EXTRA, "common")
        if value is None:
            return None
        document = self._gathered.json(value, place)
        if not self._gathered.keep(document, EXTRA, "common", "the common state"):
            return None
        self._note_steps(value.get("optimizer") if isinstance(value, dict) else None)
        for key in ("iteration", "global_step"):
            number = document.get(key) if isinstance(document, dict) else None
            if type(number) is int and number >= 0:
                return number
        return None

    def _note_steps(self, value: Any, depth: int = 0) -> None:
        """Record the steps in parameter groups, at any depth of a value."""
        if depth > _DEPTH_MAX:
            return
        if isinstance(value, dict):
            groups = value.get("param_groups")
            for group in groups if isinstance(groups, list) else ():
                self._note_step(group.get("step") if isinstance(group, dict) else None)
            self._note_step(value.get("common_step"))
            for inner in value.values():
                self._note_steps(inner, depth + 1)
        elif isinstance(value, list | tuple) and len(value) < 64:
            for inner in value:
                self._note_steps(inner, depth + 1)

    def _note_step(self, step: Any) -> None:
        if isinstance(step, PickledArray) and not step.shape:
            step = reading.fetched(self._gathered.files, step.stored("step").tensor(EXTRA, "step")).item()
        if isinstance(step, int | float) and not isinstance(step, bool):
            self._steps.add(float(step))

    def _optimizer(self) -> None:
        """Add the optimizer's step for each parameter, and its document."""
        names = list(dict.fromkeys(self._stepped))
        if not names:
            return
        if len(self._steps) == 1:
            step = self._steps.pop()
            for name in names:
                self._gathered.add(TensorSpec(optimizer_state.GROUP, f"{name}/step", "F32", ()), (), Number(step))
            self._gathered.notes.append(f"every parameter's optimizer step is {step:.0f}, from the common state")
        else:
            steps = ", ".join(f"{one:.0f}" for one in sorted(self._steps)) or "none"
            self._gathered.notes.append(f"no optimizer step is stored: the common state has several or none: {steps}")
        document = optimizer_state.document([(names, {})])
        document["masters"] = {_MASTER_KEY: self._mastered} if self._mastered else {}
        self._gathered.document(optimizer_state.GROUP, optimizer_state.KEY, document)
        self._gathered.notes.append(
            "hyper-parameters are not restored, because they do not name their weights: the trainer keeps its own; "
            "the groups are in the document `common` where Megatron stores them there"
        )


def _split(pieces: tuple[ForeignPiece, ...], count: int, width: int) -> list[tuple[ForeignPiece, ...]]:
    """The pieces of each index of the first dimension, without that dimension."""
    rows: list[list[ForeignPiece]] = [[] for _ in range(count)]
    for file, start, box, steps, member in pieces:
        inner = Box(box.offset[1:], box.shape[1:])
        for row in range(box.shape[0]):
            rows[box.offset[0] + row].append(ForeignPiece(file, start + row * steps[0] * width, inner, steps[1:], member))
    return [tuple(one) for one in rows]


def _is_empty(value: Any) -> bool:
    """Whether an object is empty: `[None]`, an empty stream of bytes, a tensor without elements."""
    if isinstance(value, list | tuple):
        return all(_is_empty(one) for one in value)
    if isinstance(value, PickledArray):
        return 0 in value.shape
    if isinstance(value, PickledRecord) and value.name == "_io.BytesIO":
        return isinstance(value.state, tuple) and bool(value.state) and getattr(value.state[0], "length", 1) == 0
    return value is None
