"""Exports a training as a directory `checkpoint-N` that the Hugging Face Trainer resumes from, without Holdfast."""

from __future__ import annotations

import json
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.listing import is_of_rank
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports import hugging_face, peft, random_states, torch_optimizers, weights
from holdfast_service.wings.convert.exports.ordered_tensors import arrange
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    LeftOut,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign import json_values, torch_zips

STATE_FILE = "trainer_state.json"
_OBJECTS = {"scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_OTHER_SCHEDULER = "lr_scheduler"
_BEGUN = {"epoch": 0.0, "log_history": [], "is_local_process_zero": True, "is_world_process_zero": True}
_NO_PLACE = "a Trainer has no file for it"


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """The weights as `save_pretrained` writes them, optimizer.pt, scheduler.pt, scaler.pt, the random states of each rank,
    and trainer_state.json.

    Raises `InvalidRequest` for options, which would change what the training resumes from, `StateMismatch` and
    `NoSuchResource` for a checkpoint without optimizer and scheduler.
    """
    if options != ExportOptions():
        raise InvalidRequest(
            "a Trainer's checkpoint is exported unchanged", hint="leave --weights, --dtype, --layout and --program out"
        )
    group = next((group for group in peft.GROUPS if source.group(group)), weights.GROUP)
    model = (peft if group in peft.GROUPS else hugging_face).plan(source, options)
    optimizer = torch_optimizers.of(source)
    files = [torch_zips.file_of("optimizer.pt", optimizer.state_dict)]
    kept = {optimizer.path, *random_states.PATHS}
    for key, file in _OBJECTS.items():
        value, path = _value(source, key)
        if path:
            files.append(torch_zips.file_of(file, value))
            kept.add(path)
    if all(file.name != _OBJECTS["scheduler"] for file in files):
        raise torch_optimizers.lacks("no learning-rate scheduler: no extra/scheduler", source)
    streams = random_states.files(source)
    notes = [*model.notes, *optimizer.notes, *streams.notes]
    made = [*model.files, *files, *streams.files, *_state(source, notes)]
    used = frozenset({group, *optimizer.groups})
    return ExportPlan(tuple(made), tuple(notes), tuple(_left_out(source, used, kept, made)))


def _value(source: ExportSource, key: str) -> tuple[Any, str]:
    """An object's state, and its path in the checkpoint; an empty path if there is none."""
    documents = source.listing.documents.get("extra", {})
    name = next((name for name in (key, _OTHER_SCHEDULER) if name in documents and (name == key or key == "scheduler")), "")
    if not name:
        return None, ""
    extra = arrange(source, None).group("extra")
    return json_values.decode(documents[name], lambda _, tensor: extra[tensor]), f"extra/{name}"


def _state(source: ExportSource, notes: list[str]) -> list[TargetFile]:
    """trainer_state.json, if it is not among the checkpoint's small files."""
    if STATE_FILE in source.assets:
        return []
    notes.append(f"{STATE_FILE} has the step alone: the checkpoint was not saved by a Trainer")
    state = {**_BEGUN, "global_step": source.listing.step or 0}
    return [small_file(STATE_FILE, json.dumps(state, indent=2, sort_keys=True).encode() + b"\n")]


def _left_out(source: ExportSource, used: frozenset[str], kept: set[str], made: list[TargetFile]) -> list[LeftOut]:
    written = {move.source for file in made for tensor in file.tensors for move in tensor.mapped.moves}
    left_out = other_groups(source, used | {"extra"}, _NO_PLACE)
    left_out += values_of_weights(source, used - {"optim", "master"})
    values = [f"extra/{key}" for key in source.listing.documents.get("extra", {})]
    values += [name for name in source.ranked if name.startswith("extra/")]
    left_out += [LeftOut(name, _NO_PLACE) for name in sorted(set(values) - kept)]
    tensors = {_entry(key.name) for key in source.listing.tensors if key.group == "extra" and key not in written}
    return left_out + [LeftOut(name, _NO_PLACE) for name in sorted(tensors - set(values) - kept)]


def _entry(name: str) -> str:
    """The value to which a tensor of group `extra` belongs."""
    parts = name.split("/")
    return f"extra/{parts[2] if is_of_rank(name) and len(parts) > 2 else parts[0]}"


KIND = ExportKind("trainer", EXPORT_KINDS["trainer"], plan)
