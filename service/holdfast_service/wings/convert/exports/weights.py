"""Chooses the weights of an export, under the model's names: the model's, their averages or their full-precision masters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey, is_of_rank
from holdfast_formats.near_names import one_of
from holdfast_service.wings.convert.exports.ordered_tensors import Arranged
from holdfast_service.wings.convert.exports.plan import ExportOptions, LeftOut
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import tied

GROUP = "model"
NOT_WEIGHTS = frozenset({"n_averaged"})  # AveragedModel's count, among the averages
SHOWN_MAX = 8
_EXACT = frozenset({("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")})


class ChosenWeights(NamedTuple):
    """The weights by name, in group `model`, and notes."""

    tensors: Mapping[str, MappedTensor]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def choose(source: ExportSource, arranged: Arranged, options: ExportOptions, as_stored: bool = False) -> ChosenWeights:
    """The requested weights in `options.dtype`; without one in the model's dtypes, or in their own if `as_stored`.

    Raises `NoSuchResource` for a missing group, `StateMismatch` for mismatched names or shapes, and for dtypes that
    cannot be converted.
    """
    model = _weights(arranged, GROUP)
    if not model:
        hint = f"groups: {', '.join(source.groups) or 'none'}; leave --as out to export each to files of its name"
        raise NoSuchResource(f"the checkpoint has no group {GROUP!r}", hint=hint)
    taken, notes, left_out = model, list(arranged.notes), list[LeftOut]()
    if options.weights != GROUP:
        taken, missing, left_out = _instead(source, arranged, options.weights)
        if missing:
            notes.append(f"missing in group {options.weights} and taken from the model: {named(missing)}")
    likes = taken if as_stored else model
    cast = {name: _cast(taken[name], GROUP, name, likes[name].spec.dtype, options.dtype) for name in model}
    notes += roundings(source, cast.values())
    return ChosenWeights(cast, tuple(notes), tuple(left_out))


def named(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX])
    return f"{shown} and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else shown


def roundings(source: ExportSource, mapped_tensors: Iterable[MappedTensor]) -> list[str]:
    """Notes on converted values; `StateMismatch` for types that cannot be converted."""
    counted: Counter[tuple[str, str]] = Counter()
    for mapped in mapped_tensors:
        name, after = mapped.spec.name, mapped.spec.dtype
        for before in {source.listing.tensors[move.source].spec.dtype for move in mapped.moves} - {after}:
            if not {before, after} <= FLOATS.keys():
                raise StateMismatch(
                    f"tensor {name!r} cannot be converted from {before} to {after}",
                    hint="leave --weights and --dtype out",
                    tensor=name,
                )
            counted[before, after] += 1
    notes = []
    for (before, after), count in sorted(counted.items()):
        how = "converted" if (before, after) in _EXACT else "rounded"
        notes.append(f"{count} tensors were {how} from {FLOATS[before]} to {FLOATS[after]}")
    return notes


def _instead(
    source: ExportSource, arranged: Arranged, group: str
) -> tuple[dict[str, MappedTensor], list[str], list[LeftOut]]:
    """For each of the model's tensors that of another group, or its own; those missing there; and the group's others."""
    model, held = _weights(arranged, GROUP), _weights(arranged, group)
    if not arranged.names:  # what is tied there only; a program has made one of such tensors
        held = tied(held, source.ties(group))
    if not held:
        raise NoSuchResource(
            f"the checkpoint has no group {group!r}",
            hint=one_of(group, list(source.groups), "groups"),
        )
    _check_ties(source, group)
    aliases = source.ties(GROUP)
    replaced, missing = dict(model), list[str]()
    for name, tensor in model.items():
        second = next((alias for alias, target in aliases.items() if target == name and alias in held), None)
        other = held.get(name) or (held[second] if second else None)
        if other is None:
            missing.append(name)
            continue
        if other.spec.shape != tensor.spec.shape:
            raise StateMismatch(
                f"{name!r} has shape {list(other.spec.shape)} in group {group} and {list(tensor.spec.shape)} in the model",
                hint="export the model's weights: leave --weights out",
                tensor=name,
            )
        replaced[name] = other
    left = sorted(held.keys() - model.keys() - aliases.keys(), key=natural_key)
    _check_names(arranged, group, left, sorted(missing, key=natural_key))
    left_out = [LeftOut(f"{group}/{name}", "the model has no such tensor") for name in left]
    return replaced, sorted(missing, key=natural_key), left_out


def _weights(arranged: Arranged, group: str) -> dict[str, MappedTensor]:
    """The tensors of a group, except modules' values beside their weights."""
    return {name: mapped for name, mapped in arranged.group(group).items() if not is_of_rank(name)}


def _check_names(arranged: Arranged, group: str, left: list[str], missing: list[str]) -> None:
    """Refuse a group with names unlike the model's: its weights would be exported as the averages."""
    model = _weights(arranged, GROUP)
    unknown = [name for name in left if name not in NOT_WEIGHTS]
    lost = [name for name in missing if model[name].spec.dtype in FLOATS]
    if len(missing) < len(model) and not (unknown and lost):
        return
    raise StateMismatch(
        f"the names of group {group} do not match the model's: it has {named(unknown or left)}, "
        f"and lacks {named(lost or missing)}",
        hint=f"export the model's weights, or save group {group} under the model's names",
        tensor=(lost or missing)[0],
    )


def _check_ties(source: ExportSource, group: str) -> None:
    """Refuse tensors that are tied in the model but differ in the other group: one of them would be lost."""
    entries = source.group(group)
    for alias, target in source.ties(GROUP).items():
        if alias in entries and target in entries and not source.equal(TensorKey(group, alias), TensorKey(group, target)):
            raise StateMismatch(
                f"{alias!r} and {target!r} are tied in the model but differ in group {group}",
                hint="export the model's weights: leave --weights out",
                tensor=alias,
            )


def _cast(mapped: MappedTensor, group: str, name: str, dtype: str, wanted: str | None) -> MappedTensor:
    """The tensor under this key, in the model's dtype, or if that is a float in the requested one."""
    target_dtype = wanted if wanted is not None and dtype in FLOATS else dtype
    return mapped._replace(spec=msgspec.structs.replace(mapped.spec, group=group, name=name, dtype=target_dtype))
