"""Chooses the weights of an export: those of the model, their averages or their full-precision masters, under the model's
names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.foreign.committed import ExportSource, refuse_sub_byte, same_bytes
from holdfast_formats.foreign.exports.plan import FLOATS, ExportOptions, LeftOut
from holdfast_formats.foreign.listing import ForeignTensor, TensorKey
from holdfast_formats.foreign.moves import MappedTensor, same

GROUP = "model"
NOT_WEIGHTS = frozenset({"n_averaged"})  # AveragedModel's count, among the averages
SHOWN_MAX = 8
_EXACT = frozenset({("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")})


class ChosenWeights(NamedTuple):
    """The weights by the names that they get, and what is to be said about them."""

    tensors: Mapping[str, MappedTensor]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


def choose(source: ExportSource, options: ExportOptions) -> ChosenWeights:
    """The weights that were asked for, in the model's dtypes or in `options.dtype`.

    Raises `NoSuchResource` for a group that is not there, `StateMismatch`, by name, for names or shapes that do not
    correspond, and for dtypes that cannot be converted.
    """
    model = dict(source.group(GROUP))
    if not model:
        raise NoSuchResource(f"there is no group {GROUP!r}", hint=f"groups: {', '.join(source.made.groups) or 'none'}")
    refuse_sub_byte(model)
    taken, notes, left_out = model, list[str](), list[LeftOut]()
    if options.weights != GROUP:
        taken, missing, left_out = _instead(source, options.weights, model)
        if missing:
            notes.append(f"not in group {options.weights}, so taken from the model: {named(missing)}")
    if options.program is not None:
        made = dict(options.program(model))
        made = {name: _from(mapped, taken) for name, mapped in made.items()}
        dtypes = {name: mapped.spec.dtype for name, mapped in made.items()}
    else:
        dtypes = {name: tensor.spec.dtype for name, tensor in model.items()}
        made = {name: same(taken[name], TensorKey(GROUP, name)) for name in model}
    cast = {name: _cast(mapped, dtypes[name], options) for name, mapped in made.items()}
    notes += _roundings(taken, cast)
    return ChosenWeights(cast, tuple(notes), tuple(left_out))


def named(names: list[str]) -> str:
    """The first of many names, for a sentence."""
    shown = ", ".join(names[:SHOWN_MAX])
    return f"{shown} and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else shown


def _instead(
    source: ExportSource, group: str, model: Mapping[str, ForeignTensor]
) -> tuple[dict[str, ForeignTensor], list[str], list[LeftOut]]:
    """For each tensor of the model that of another group, or its own; which have none there; what else the group has."""
    held = source.group(group)
    if not held:
        raise NoSuchResource(
            f"the checkpoint has no group {group!r}", hint=f"groups: {', '.join(source.made.groups) or 'none'}"
        )
    aliases = source.made.aliases.get(GROUP, {})
    found, missing = dict(model), list[str]()
    for name, tensor in model.items():
        tied = next((alias for alias, target in aliases.items() if target == name and alias in held), None)
        other = held.get(name) or (held[tied] if tied else None)
        if other is None:
            missing.append(name)
            continue
        if other.spec.shape != tensor.spec.shape:
            raise StateMismatch(
                f"{name!r} has shape {list(other.spec.shape)} in group {group} and {list(tensor.spec.shape)} in the model",
                tensor=name,
            )
        found[name] = other
    missing.sort(key=natural_key)
    _check_ties(source, group, held)
    left = sorted(held.keys() - model.keys() - aliases.keys())
    unknown = [name for name in left if name not in NOT_WEIGHTS]
    lost = [name for name in missing if model[name].spec.dtype in FLOATS]
    if len(missing) == len(model) or (unknown and lost):
        raise StateMismatch(
            f"the names of group {group} are not those of the model: it has {named(unknown or left)}, "
            f"and lacks {named(lost or missing)}",
            hint=f"export the model's weights, or save group {group} under the model's names",
            tensor=(lost or missing)[0],
        )
    return found, missing, [LeftOut(f"{group}/{name}", "the model has no such tensor") for name in left]


def _check_ties(source: ExportSource, group: str, held: Mapping[str, ForeignTensor]) -> None:
    """Refuse what is tied in the model and differs in the other group: only one of the two would be exported."""
    entries = source.made.tensors[group]
    for alias, target in source.made.aliases.get(GROUP, {}).items():
        if alias in held and target in held and not same_bytes(entries[alias], entries[target]):
            raise StateMismatch(
                f"{alias!r} and {target!r} are one tensor in the model and differ in group {group}", tensor=alias
            )


def _from(mapped: MappedTensor, taken: Mapping[str, ForeignTensor]) -> MappedTensor:
    """The same moves out of the tensors that were chosen instead of the model's."""
    moves = tuple(move._replace(source=taken[move.source.name].key) for move in mapped.moves)
    return mapped._replace(moves=moves)


def _cast(mapped: MappedTensor, dtype: str, options: ExportOptions) -> MappedTensor:
    wanted = options.dtype if options.dtype is not None and dtype in FLOATS else dtype
    return mapped._replace(spec=msgspec.structs.replace(mapped.spec, dtype=wanted))


def _roundings(taken: Mapping[str, ForeignTensor], made: Mapping[str, MappedTensor]) -> list[str]:
    """Sentences about values that change; `StateMismatch`, by name, for types that cannot be converted."""
    stored = {tensor.key: tensor.spec.dtype for tensor in taken.values()}
    counted: Counter[tuple[str, str]] = Counter()
    for name, mapped in made.items():
        for before in {stored[move.source] for move in mapped.moves}:
            after = mapped.spec.dtype
            if before != after and not {before, after} <= FLOATS.keys():
                raise StateMismatch(f"tensor {name!r} cannot be converted from {before} to {after}", tensor=name)
            if before != after:
                counted[before, after] += 1
    told = []
    for (before, after), count in sorted(counted.items()):
        how = "converted" if (before, after) in _EXACT else "rounded"
        over = "; values over 65504 become infinite" if after == "F16" and before != "F16" else ""
        told.append(f"{count} tensors were {how} from {FLOATS[before]} to {FLOATS[after]}{over}")
    return told
