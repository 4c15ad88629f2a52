"""Maps a rank's live tensors to stored tensors, by a layout that describes them.

`rank_tensors` goes from stored tensors to a rank's tensors. Here the rank has its local tensors already, and the shapes
of the stored ones come from the model's config: a save needs no other rank to know where its bytes belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.elements import Specs, compose, split_key
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.layout.rank_tensors import KEYED_GROUP, LayoutHoldings
from holdfast_formats.layout.rules import Rules
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec

_LOCAL_FORMS = {"qkv": "ranks", "gate_up": "ranks", "experts": "stacked"}


class DeclaredTensor(NamedTuple):
    """A live local tensor: its parts, and the stored tensors to which these belong, by name."""

    local: LocalTensor
    specs: dict[str, TensorSpec]


def declare(
    layout: Layout, rank: int, rules: Rules, group: str, local: Specs, parameters: Iterable[str] = ()
) -> dict[str, DeclaredTensor]:
    """For every live local tensor of a group, determine which boxes of which stored tensors it holds.

    `local` gives their dtypes and local shapes by name. `parameters` names, in order, all parameters whose state the
    ranks of a sharding group hold together, if this rank does not hold a part of each. Fused live names imply the
    layout's form. Raises `StateMismatch`, with tensor and numbers, if layout, config and live shapes disagree.
    """
    keyed = group == KEYED_GROUP
    parameters = tuple(parameters)
    layout = with_forms(layout, (*parameters, *(split_key(name, keyed)[0] for name in local)), rules)
    specs = _stored_specs(layout, rules, local, parameters, keyed)
    held = {tensor.name: tensor for tensor in LayoutHoldings(layout, group, specs, rules).of(rank).tensors}
    declared_tensors: dict[str, DeclaredTensor] = {}
    for name, (dtype, shape) in local.items():
        tensor = held.get(name)
        if tensor is None and 0 in shape:  # other ranks hold all of it
            declared_tensors[name] = DeclaredTensor(LocalTensor(name, dtype, shape, ()), {})
            continue
        if tensor is None or tensor.shape != shape:
            where = "has no part of it" if tensor is None else f"should have {list(tensor.shape)}"
            raise StateMismatch(
                f"tensor {name!r} of group {group!r} has the local shape {list(shape)}, rank {rank} of this layout {where}",
                hint="check the layout, its rank order and sharding, and that config.json belongs to this model",
            )
        named = dict.fromkeys(part.tensor for part in tensor.parts)
        declared_tensors[name] = DeclaredTensor(tensor, {n: TensorSpec(group, n, *specs[n]) for n in named})
    return declared_tensors


def with_forms(layout: Layout, parameters: Iterable[str], rules: Rules) -> Layout:
    """The layout with the forms that follow from live parameters' names, unless it states them."""
    shown: dict[str, str] = {}
    for parameter in parameters:
        fusion = rules.fusion(parameter)
        if fusion is not None:  # the architecture's own fused tensor has the architecture's own pattern
            shown.setdefault(fusion.kind, "" if rules.stored(fusion.of[0]) == fusion else _LOCAL_FORMS[fusion.kind])
            continue
        for possible in rules.fusions(parameter):
            shown.setdefault(possible.kind, "split")
    stated = {kind: form for kind, form in layout.forms._asdict().items() if form}
    return layout._replace(forms=layout.forms._replace(**{**shown, **stated}))


def _stored_specs(
    layout: Layout, rules: Rules, local: Specs, parameters: Iterable[str], keyed: bool
) -> dict[str, tuple[str, Shape]]:
    """The stored tensors of everything that this rank holds or shares in, in distribution order."""
    specs: dict[str, tuple[str, Shape]] = {}
    aliases = rules.aliases()
    for name, dtype, shape in _expected(local, parameters, keyed):
        parameter, key = split_key(name, keyed)
        parameter = aliases.get(parameter, parameter)
        fusion = rules.fusion(parameter)
        for part in fusion.of if fusion is not None else (parameter,):
            stored = rules.stored(part)
            if shape == () and keyed:
                specs[(stored.name if stored else part) + key] = (dtype, ())
            elif stored is None:
                specs[part + key] = (dtype, _shape(part, rules, layout, shape if fusion is None else None))
            elif stored.name + key not in specs:
                count = len(stored.of) // (rules.experts or 1) if stored.stacked else len(stored.of)
                shapes = tuple(_shape(each, rules, layout, None) for each in stored.of[:count])
                specs[stored.name + key] = (dtype, compose(stored, stored.name, key, dtype, shapes).shape)
    return specs


def stored_shape(name: str, rules: Rules) -> Shape | None:
    """The shape of a stored tensor by its rule, or its fused parts' rules; None if the config does not determine it."""
    fusion = rules.fusion(name)
    if fusion is None:
        rule = rules.rule(name)
        return None if rule is None else rule.shape
    count = len(fusion.of) // (rules.experts or 1) if fusion.stacked else len(fusion.of)
    shapes = [rule.shape for part in fusion.of[:count] if (rule := rules.rule(part)) is not None and rule.shape is not None]
    known = len(shapes) == count and fusion.groups
    return compose(fusion, name, "", "F32", tuple(shapes)).shape if known else None


def _expected(local: Specs, parameters: Iterable[str], keyed: bool) -> Iterator[tuple[str, str, Shape | None]]:
    """Names with dtypes and, for live tensors, local shapes: all parameters, then all other live tensors."""
    keys: dict[str, tuple[str, Shape | None]] = {}
    for name, (dtype, shape) in local.items():
        keys[split_key(name, keyed)[1]] = dtype, () if shape == () else None
    names: set[str] = set()
    for parameter in parameters:
        for key, expected in keys.items():
            name = parameter + key
            names.add(name)
            yield (name, *local.get(name, expected))
    for name, (dtype, shape) in local.items():
        if name not in names:
            yield name, dtype, shape


def _shape(element: str, rules: Rules, layout: Layout, local: Shape | None) -> Shape:
    """The global shape of an element tensor: from the config, or the local one if nothing cuts it."""
    rule = rules.rule(element)
    if rule is not None and rule.shape is not None:
        return rule.shape
    whole = rule is None or rule.dimension is None or layout.mesh.tp == layout.mesh.etp == 1
    if local is None or not whole or layout.stage:
        raise StateMismatch(
            f"the global shape of tensor {element!r} is unknown",
            hint="pass the model's config.json, or rules that state its shape",
        )
    return local
