"""Exports a model as a torch_dist checkpoint of Megatron-core, which any tensor, pipeline and expert parallelism loads.

latest_checkpointed_iteration.txt    `release`, as Megatron-LM calls weights without an optimizer
release/metadata.json, common.pt     the format, and how layers are named
release/.metadata, __0_N.distcp      the weights: layers and experts stacked, as Megatron-core saves those that are alike

For every module with a weight there is an empty extra state, which Transformer Engine's modules ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import choice
from holdfast_formats.programs.compilation import compile_program
from holdfast_formats.programs.compiled import CompiledProgram
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports import weights
from holdfast_service.wings.convert.exports.ordered_tensors import arrange, config_of
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    copied_assets,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import tied
from holdfast_service.wings.convert.foreign import torch_zips
from holdfast_service.wings.convert.foreign.dcp.export import files_of
from holdfast_service.wings.convert.foreign.dcp.export_names import ExportedLeaf

NAME, HF = "megatron", "hf"  # as mapping programs call these names
DIRECTORY, LATEST = "release", "latest_checkpointed_iteration.txt"
STACKED, BY_NUMBER = "stacked", "by-number"
VERSION = 3.0  # of Megatron's order of queries, keys and values
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_OWN = re.compile(r"(.*\.)?(embedding\.word_embeddings|decoder\.layers\.\d+\.self_attention\.linear_(qkv|proj))\.weight")
_LAYER = re.compile(r"((?:.*\.)?layers)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(experts\..+)")
_LAYERS, _EXPERTS = re.compile(r"(?:.*\.)?layers\.(?!\d+\.)"), ".experts.experts."
_ATTENTION, _CORE = ".self_attention.linear_qkv", ".self_attention.core_attention"
_NO_PLACE = "Megatron's optimizer takes its masters from the weights of a release"


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """The weights under Megatron's names: the checkpoint's own, those of `options.program`, or of the program for its model.

    `options.layout` is `stacked` or `by-number`; without one, layers are stacked if they are alike. Raises `InvalidRequest`
    for a model that no program is for, `StateMismatch` for layers or experts that cannot be stacked.
    """
    if options.layout not in (None, STACKED, BY_NUMBER):
        raise InvalidRequest(f"there is no layout {options.layout!r} of Megatron", hint=f"one of {STACKED}, {BY_NUMBER}")
    groups = frozenset({weights.GROUP, options.weights})
    program = options.program or _program(source, groups)
    arranged = arrange(source, program)
    chosen = weights.choose(source, arranged, options, as_stored=True)
    tensors = dict(chosen.tensors) if program is not None else tied(chosen.tensors, source.ties(weights.GROUP))
    made = _stacked(list(tensors.values()), _EXPERT, "experts")
    alike = _are_alike(made)
    by_number = options.layout == BY_NUMBER or (options.layout is None and not alike)
    if not (by_number or alike):
        raise StateMismatch("the layers have different tensors and cannot be stacked", hint=f"--layout {BY_NUMBER}")
    if not by_number:
        made = _stacked(made, _LAYER, "layers")
    extra = dict.fromkeys(key for one in made for key in _extra_states(one))
    leaves = [ExportedLeaf((one.spec.name,), one) for one in made] + [ExportedLeaf((key,), None, [None]) for key in extra]
    exported = files_of(leaves, DIRECTORY)
    common = {
        "iteration": source.listing.step or 0,
        "checkpoint_version": VERSION,
        "content_metadata": {"non_homogeneous_layers": by_number, "singleton_local_shards": False},
    }
    files = (
        *exported.files,
        small_file(f"{DIRECTORY}/common.pt", torch_zips.of_value(common)),
        small_file(f"{DIRECTORY}/metadata.json", json.dumps(_FORMAT).encode()),
        small_file(LATEST, DIRECTORY.encode()),
    )
    how = f"layers are {'named by their numbers' if by_number else 'stacked'}, and common.pt says so"
    left_out = [*chosen.left_out, *other_groups(source, groups, _NO_PLACE), *values_of_weights(source, groups)]
    return ExportPlan((*files, *copied_assets(source)), (*chosen.notes, how), tuple(left_out))


def _program(source: ExportSource, groups: frozenset[str]) -> CompiledProgram | None:
    """The program from Hugging Face's names to Megatron's for the checkpoint's model; None if it has Megatron's already."""
    if any(_OWN.fullmatch(name) for name in source.group(weights.GROUP)):
        return None
    config = config_of(source)
    aliases = {TensorKey(group, alias) for group, held in source.aliases.items() for alias in held}
    listed = source.listing.tensors.items()
    specs = {key: one.spec for key, one in listed if key.group in groups and key not in aliases}
    return compile_program(choice.find(HF, NAME, config), specs, config)


def _extra_states(mapped: MappedTensor) -> Iterator[str]:
    """The keys of the extra states of the module that has this weight: one for each layer and expert of a stack."""
    owner, _, last = mapped.spec.name.rpartition(".")
    if last != "weight":
        return
    stacked = bool(_LAYERS.match(owner)) + bool(_EXPERTS in owner)
    counts = mapped.spec.shape[:stacked] or (1,)
    for place in product(*map(range, counts)):
        shard = f"_extra_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, counts))}"
        yield f"{owner}.{shard}"
        if owner.endswith(_ATTENTION):
            yield f"{owner.removesuffix(_ATTENTION)}{_CORE}.{shard}"


def _are_alike(tensors: Sequence[MappedTensor]) -> bool:
    """Whether the layers of each module have the same tensors."""
    layers: dict[str, dict[int, dict[str, object]]] = {}
    for one in tensors:
        found = _LAYER.fullmatch(one.spec.name)
        if found is not None:
            held = layers.setdefault(found[1], {}).setdefault(int(found[2]), {})
            held[found[3]] = (one.spec.dtype, one.spec.shape)
    return all(
        sorted(held) == list(range(len(held))) and all(one == held[0] for one in held.values()) for held in layers.values()
    )


def _stacked(tensors: Sequence[MappedTensor], pattern: re.Pattern[str], what: str) -> list[MappedTensor]:
    """The tensors, those of all numbers as one with a first dimension; `StateMismatch` for numbers that are missing."""
    members: dict[str, dict[int, MappedTensor]] = {}
    made: dict[str, MappedTensor] = {}
    for one in tensors:
        found = pattern.fullmatch(one.spec.name)
        name = one.spec.name if found is None else f"{found[1]}.{found[3]}"
        if found is not None:
            members.setdefault(name, {})[int(found[2])] = one
        made.setdefault(name, one)
    for name, held in members.items():
        specs = {(one.spec.dtype, one.spec.shape) for one in held.values()}
        if sorted(held) != list(range(len(held))) or len(specs) > 1:
            raise StateMismatch(
                f"{name!r} cannot be stacked: {what} {sorted(held)[:8]} have it, in {len(specs)} shapes or types",
                hint="export all tensors under their own names: --as dcp --layout plain",
                tensor=name,
            )
        made[name] = _stack(name, [held[number] for number in range(len(held))])
    return list(made.values())


def _stack(name: str, members: Sequence[MappedTensor]) -> MappedTensor:
    """Tensors of one shape as the rows of a tensor."""
    spec = members[0].spec
    spec = msgspec.structs.replace(spec, name=name, shape=(len(members), *spec.shape))
    moves = [
        move._replace(
            target=Box((row, *move.target.offset), (1, *move.target.shape)),
            axes=(None, *move.axes),
            target_step=(1, *move.target_step) if move.target_step else (),
        )
        for row, member in enumerate(members)
        for move in member.moves
    ]
    return MappedTensor(spec, tuple(moves), any(member.padded for member in members))


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)
