"""Exports a pipeline of diffusers as the directory that `DiffusionPipeline.from_pretrained` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.ordered_tensors import arrange
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.safetensors_files import shard_set
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import tied
from holdfast_service.wings.convert.foreign.diffusers import INDEX, components

_CONFIG, _CLASS = "config.json", "_class_name"  # diffusers writes the class of its models into their configuration
_STEM, _STEM_OF_DIFFUSERS = "model", "diffusion_pytorch_model"
_INDEXED = 2  # files of a component that have an index


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """Each component's weights and small files in a directory of its own, and the files beside them.

    Raises `NoSuchResource` for a checkpoint that is no pipeline, or lacks weights of a component.
    """
    for name in ("layout", "dtype", "program"):
        if getattr(options, name) is not None:
            raise InvalidRequest(f"--{name} does not apply to a pipeline of diffusers", hint=f"leave --{name} out")
    if options.weights != "model":
        raise InvalidRequest("--weights does not apply to a pipeline of diffusers", hint="leave --weights out")
    if INDEX not in source.assets:
        single = _STEM_OF_DIFFUSERS in source.groups  # which diffusers loads as it was committed
        hint = "export this single component: leave --as out" if single else "export a single model: --as hf"
        raise NoSuchResource(f"the checkpoint has no {INDEX}", hint=hint)
    named = components(_document(source, INDEX))
    arranged = arrange(source, None)
    files = list[TargetFile]()
    for asset in source.assets:
        component, dot, inner = asset.partition(".")
        path = f"{component}/{inner}" if dot and component in named else asset
        files.append(small_file(path, source.read_asset(asset)))
    for name in named:
        held = arranged.group(name)
        if held:
            files += _weights(source, name, tied(held, source.ties(name)))
        elif not any(file.name.startswith(f"{name}/") for file in files):
            raise NoSuchResource(f"the checkpoint has nothing of component {name!r}", hint="export a single model: --as hf")
    used = frozenset(named)
    left_out = other_groups(source, used, "it is no component of the pipeline") + values_of_weights(source, used)
    return ExportPlan(tuple(files), left_out=tuple(left_out))


def _weights(source: ExportSource, name: str, held: Mapping[str, MappedTensor]) -> list[TargetFile]:
    config = f"{name}.{_CONFIG}"
    of_diffusers = config in source.assets and _CLASS in _document(source, config)
    stem = _STEM_OF_DIFFUSERS if of_diffusers else _STEM
    shards = shard_set(stem, held.values(), "pt")
    files = [*shards.files]
    if len(files) >= _INDEXED:
        files.append(shards.index_file(f"{stem}.safetensors.index.json"))
    return [file._replace(name=f"{name}/{file.name}") for file in files]


def _document(source: ExportSource, name: str) -> Mapping[str, Any]:
    try:
        document = json.loads(source.read_asset(name))
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"cannot read {name}: {error}", hint="export a single model: --as hf", file=name) from error
    return document if isinstance(document, dict) else {}


KIND = ExportKind("diffusers", EXPORT_KINDS["diffusers"], plan)
