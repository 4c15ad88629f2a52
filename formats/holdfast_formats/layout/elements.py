"""The element tensors of a group: its tensors after fused ones and stacks are split.

Layouts refer to element tensors only, so a checkpoint with `qkv_proj` or stacked experts is equivalent to one with
their parts. An optimizer's `<parameter>/<key>` is split as its parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.parts import Fused, LocalTensor, Part, fuse, stack
from holdfast_formats.layout.rules import Fusion, Rule, Rules
from holdfast_formats.region import Box, Shape, whole

Specs = Mapping[str, tuple[str, Shape]]  # name -> dtype, shape


class Element(NamedTuple):
    """An element tensor: its name (`parameter`, and for optimizer state `/key`), and the rules for the parameter."""

    name: str
    parameter: str
    key: str
    dtype: str
    shape: Shape
    rule: Rule | None


class Elements(NamedTuple):
    """A group's element tensors in the order of its own tensors, and the stored tensors that contain unstored ones."""

    by_name: dict[str, Element]
    sources: dict[str, list[Fused]]


def split_key(name: str, keyed: bool) -> tuple[str, str]:
    """Split an optimizer's name into parameter and `/key`; the whole name if the group has no keys."""
    parameter, slash, key = name.rpartition("/")
    return (parameter, slash + key) if keyed and slash else (name, "")


def take_apart(specs: Specs, rules: Rules, keyed: bool) -> Elements:
    """The elements of a group's tensors; `keyed` says that its names are `<parameter>/<key>`.

    Raises `StateMismatch`, with the tensor and the numbers, for a fused tensor that does not have the shape of its parts.
    """
    elements = Elements({}, {})
    for name, (dtype, shape) in specs.items():
        parameter, key = split_key(name, keyed)
        fusion = rules.fusion(parameter)
        if fusion is None:
            elements.by_name[name] = Element(name, parameter, key, dtype, shape, rules.rule(parameter))
            continue
        shapes: tuple[Shape, ...] = ((),)
        if shape:
            shapes = part_shapes(fusion, name, shape, rules)
            fused = compose(fusion, name, key, dtype, shapes)
        else:
            fused = one_for_all(name, dtype, [part + key for part in fusion.of])
        if fused.shape != shape:
            raise StateMismatch(
                f"tensor {name!r} has shape {list(shape)}, but its parts add up to {list(fused.shape)}",
                hint="the rules or config.json do not match this checkpoint",
            )
        source = Fused(name, shape, fused.parts)
        for position, part in enumerate(fusion.of):
            elements.sources.setdefault(part + key, []).append(source)
            element = Element(part + key, part, key, dtype, shapes[position % len(shapes)], rules.rule(part))
            elements.by_name.setdefault(element.name, element)
    return elements


def part_shapes(fusion: Fusion, name: str, shape: Shape, rules: Rules) -> tuple[Shape, ...]:
    """The shapes of the tensors that are fused into one of `shape`; in a stack, of one expert's.

    They follow from the config if there is one, else from the number of heads or as equal parts.
    """
    inner, count = shape, len(fusion.of)
    if fusion.stacked:
        if count % shape[0]:
            raise StateMismatch(
                f"tensor {name!r} stacks {shape[0]} experts, but the rules list {count}",
                hint=f"config.json or the rules must state {shape[0]} experts",
            )
        inner, count = shape[1:], count // shape[0]
    if fusion.dimension >= len(inner):
        raise StateMismatch(
            f"tensor {name!r} of shape {list(shape)} has no dimension {fusion.dimension} to be fused along",
            hint="change `dimension` of the entry in the rules, or choose another table with rules=",
        )
    stated = [rule.shape if rule else None for rule in map(rules.rule, fusion.of[:count])]
    if all(one is not None and len(one) == len(inner) for one in stated):
        return tuple(one for one in stated if one is not None)
    if fusion.kind == "qkv" and fusion.units is None:
        raise heads_unknown(name)
    weights = (fusion.units[0], fusion.units[1], fusion.units[1]) if fusion.units and count == 3 else (1,) * count
    length = inner[fusion.dimension]
    if length % sum(weights):
        raise StateMismatch(
            f"tensor {name!r}: {length} rows in dimension {fusion.dimension} cannot be split in the ratio {weights}",
            hint="add config.json to the checkpoint, or pass rules with the sizes",
        )
    return tuple(_resized(inner, fusion.dimension, length // sum(weights) * weight) for weight in weights)


def compose(fusion: Fusion, name: str, key: str, dtype: str, shapes: tuple[Shape, ...]) -> LocalTensor:
    """The whole fused tensor, made of whole elements in the checkpoint's pattern.

    Raises `StateMismatch` if that pattern depends on an unknown number of heads.
    """
    if not fusion.groups:
        raise heads_unknown(name)
    count = len(shapes)
    layers = [
        fuse(
            name,
            dtype,
            [(part + key, whole(shape)) for part, shape in zip(fusion.of[at : at + count], shapes, strict=True)],
            fusion.dimension,
            fusion.groups,
        )
        for at in range(0, len(fusion.of), count)
    ]
    return stack(name, layers) if fusion.stacked else layers[0]


def heads_unknown(name: str) -> StateMismatch:
    return StateMismatch(f"tensor {name!r}: the number of heads is not known", hint="add config.json to the checkpoint")


def one_for_all(name: str, dtype: str, elements: Sequence[str]) -> LocalTensor:
    """A scalar of a fused parameter's optimizer state, shared by all its parts."""
    return LocalTensor(name, dtype, (), tuple(Part(element, Box((), ()), 0, ()) for element in elements))


def _resized(shape: Shape, dimension: int, length: int) -> Shape:
    return (*shape[:dimension], length, *shape[dimension + 1 :])
