"""Values of a recipe's parameters: one for all tensors, one by a filter of their names, or gradients over the layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast_service.wings.merge.methods import MergeParameter, Value
from holdfast_service.wings.merge.recipe_document import Located

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
FILTERS = ("filter", "value")


class LayerName(NamedTuple):
    """The name of a tensor of a layer: what is before the layer's number, the number, and what is behind it."""

    stack: str
    number: int
    rest: str

    def renumbered(self, number: int) -> str:
        return f"{self.stack}{number}{self.rest}"


def layer_of(name: str) -> LayerName | None:
    """The parts of a tensor's name; None if it belongs to no layer."""
    match = _LAYER.search(name)
    return None if match is None else LayerName(name[: match.start(1)], int(match[1]), name[match.end(1) :])


class FilteredValue(NamedTuple):
    """A value, or points of a gradient, for tensors whose name contains `filter`; None: for all."""

    filter: str | None
    points: tuple[Value, ...]
    gradient: bool

    def fits(self, tensor: str) -> bool:
        return self.filter is None or self.filter == "*" or self.filter in tensor


class Setting(NamedTuple):
    """A recipe's values of a parameter; the first choice that fits a tensor counts."""

    choices: tuple[FilteredValue, ...]
    line: int

    def value(self, tensor: str, depth: float) -> Value | None:
        """The value for a tensor at this depth, from 0 to 1; None if no choice fits it."""
        choice = next((one for one in self.choices if one.fits(tensor)), None)
        if choice is None:
            return None
        return _at(choice.points, depth) if choice.gradient else choice.points[0]

    def unused(self, tensors: Iterable[str]) -> list[str]:
        return [one.filter for one in self.choices if one.filter is not None and not any(map(one.fits, tensors))]


Settings = Mapping[str, Setting]


def read_setting(given: Located, parameter: MergeParameter) -> Setting:
    """The value at a parameter's key; `InvalidRequest` by key and line for an invalid one."""
    if isinstance(given.value, dict):
        return Setting((_conditional(given, parameter),), given.line)
    if isinstance(given.value, list):
        entries = given.items()
        if not entries:
            given.refuse("is an empty list", "write a value, or delete the line")
        if all(isinstance(one.value, dict) for one in entries):
            return Setting(tuple(_conditional(one, parameter) for one in entries), given.line)
    return Setting((_choice(None, given, parameter),), given.line)


def _conditional(given: Located, parameter: MergeParameter) -> FilteredValue:
    keys = given.mapping(FILTERS)
    if "value" not in keys:
        given.refuse("has a filter, but no value", "add `value` beside `filter`")
    word = keys["filter"].text() if "filter" in keys and keys["filter"].value is not None else None
    return _choice(word, keys["value"], parameter)


def _choice(word: str | None, given: Located, parameter: MergeParameter) -> FilteredValue:
    if not isinstance(given.value, list):
        return FilteredValue(word, (_checked(given, parameter),), False)
    if parameter.kind is not float:
        given.refuse(f"has points of a gradient, which {parameter.name} cannot have", "write one value")
    points = tuple(_checked(one, parameter) for one in given.items())
    if not points:
        given.refuse("is an empty list", "write a value, or delete the line")
    return FilteredValue(word, points, True)


def _checked(given: Located, parameter: MergeParameter) -> Value:
    if given.value is None or isinstance(given.value, list | dict):
        given.refuse(f"is not a value of {parameter.name}", "write one value, or delete the line")
    try:
        return parameter.checked(given.value)
    except ValueError as error:
        given.refuse(f"is {given.value!r} instead of {error}", "change the value, or delete the line")


def _at(points: Sequence[Value], depth: float) -> float:
    """Interpolate between the two points around this depth, the first at 0 and the last at 1."""
    scaled = depth * (len(points) - 1)
    first = int(scaled)
    share = scaled - first
    return (1 - share) * float(points[first]) + share * float(points[min(first + 1, len(points) - 1)])


def depths(tensors: Iterable[str]) -> dict[str, float]:
    """The depth of each tensor in the model: the rank of its layer among tensors of the same name, from 0 to 1.

    Tensors of no layer are at 0, as in mergekit: those before the layers, and those behind.
    """
    found = {name: layer_of(name) for name in tensors}
    last: dict[str, int] = {}
    for one in found.values():
        if one is not None:
            last[one.stack] = max(last.get(one.stack, 0), one.number)
    return {name: 0.0 if one is None else _depth(one.number, last[one.stack]) for name, one in found.items()}


def _depth(number: int, last: int) -> float:
    return number / last if last else 1.0
