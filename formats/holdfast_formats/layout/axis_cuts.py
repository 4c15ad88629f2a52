"""Cuts an element tensor along an axis into each rank's box, by the rule of its table.

Elements that are cut alike are of one kind, and a kind is cut once for each rank of its axis, because a model has many
tensors and few kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.elements import Element
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.mesh import Coordinate
from holdfast_formats.layout.parts import LocalTensor, Part, strides
from holdfast_formats.region import Box, Shape, whole


class Cut(NamedTuple):
    """A rank's share of an element: its box, the local shape (larger with padding), and a note."""

    box: Box
    shape: Shape
    strides: Shape
    note: str

    def of(self, element: Element) -> LocalTensor:
        """The element's share as a local tensor of its own."""
        parts = (Part(element.name, self.box, 0, self.strides),) if 0 not in self.box.shape else ()
        return LocalTensor(element.name, element.dtype, self.shape, parts)


class _Kind(NamedTuple):
    """The inputs of a cut; `known`: there is a rule."""

    shape: Shape
    dimension: int | None
    axis: str
    units: int | None
    otherwise: str
    vocabulary: bool
    known: bool
    keyed: bool


class Cutter:
    """Cuts elements for the ranks of one layout."""

    def __init__(self, layout: Layout, elements: Iterable[Element] = ()) -> None:
        self._layout = layout
        self._kinds: dict[_Kind, tuple[Element, dict[int, Cut]]] = {}
        self._of: dict[str, dict[int, Cut]] = {}
        for element in elements:
            self._add(element)

    def cut(self, element: Element, at: Coordinate) -> Cut:
        """The box of the rank at a coordinate; `StateMismatch`, with the numbers, if the element's rule refuses."""
        cuts = self._of.get(element.name)
        return self._at(element, self._add(element) if cuts is None else cuts, at)

    def shapes(self, at: Coordinate) -> tuple[Shape, ...]:
        """The local shape of every kind: if equal, ranks hold the same amount of the same elements."""
        return tuple(self._at(first, cuts, at).shape for first, cuts in self._kinds.values())

    def _add(self, element: Element) -> dict[int, Cut]:
        _, cuts = self._kinds.setdefault(_kind(element), (element, {}))
        self._of[element.name] = cuts
        return cuts

    def _at(self, element: Element, cuts: dict[int, Cut], at: Coordinate) -> Cut:
        index = at.etp if element.rule is not None and element.rule.axis == "etp" else at.tp
        cut = cuts.get(index)
        if cut is None:
            cut = cuts[index] = self._cut(element, index)
        return cut

    def _cut(self, element: Element, index: int) -> Cut:
        rule, shape, mesh = element.rule, element.shape, self._layout.mesh
        if rule is None:
            return _uncut(shape, "no rule matches: replicated on every rank")
        dimension = rule.dimension
        if dimension is None or dimension >= len(shape) or not rule.axis:
            return _uncut(shape)
        size = mesh.etp if rule.axis == "etp" else mesh.tp
        if rule.vocabulary and self._layout.vocabulary:
            multiple = self._layout.vocabulary * mesh.tp
            rows = -(-shape[dimension] // multiple) * multiple // size
            low, high = (min(end, shape[dimension]) for end in (rows * index, rows * (index + 1)))
            box = slab(shape, dimension, low, high)
            local = (*shape[:dimension], rows, *shape[dimension + 1 :])
            return Cut(box, local, strides(local), "")
        if size == 1:
            return _uncut(shape)
        units = rule.units or shape[dimension]
        if _odd(element) and element.key:
            return _uncut(shape, "optimizer state with another shape than its parameter: replicated")
        if _odd(element) or shape[dimension] % units:
            stated = f"the config says {list(rule.shape)}" if rule.shape else f"which cannot be split into {units} heads"
            raise StateMismatch(
                f"tensor {element.name!r} has shape {list(shape)}, {stated}",
                hint="the rules or config.json do not match this checkpoint: choose another table with rules=",
            )
        return _divided(element, units, size, index)


def slab(shape: Sequence[int], dimension: int, low: int, high: int) -> Box:
    offset, size = [0] * len(shape), list(shape)
    offset[dimension], size[dimension] = low, high - low
    return Box(tuple(offset), tuple(size))


def _kind(element: Element) -> _Kind:
    rule, keyed = element.rule, bool(element.key)
    if rule is None:
        return _Kind(element.shape, None, "", None, "", False, False, keyed)
    usual = not _odd(element)
    return _Kind(element.shape, rule.dimension, rule.axis, rule.units, rule.otherwise, rule.vocabulary, usual, keyed)


def _odd(element: Element) -> bool:
    """Whether the tensor's shape differs from the config's, for example after a vocabulary was enlarged."""
    stated = element.rule.shape if element.rule is not None else None
    if stated is None or stated == element.shape:
        return False
    rows_may_differ = element.rule is not None and element.rule.vocabulary and not element.key
    return not (rows_may_differ and stated[1:] == element.shape[1:])


def _uncut(shape: Shape, note: str = "") -> Cut:
    return Cut(whole(shape), shape, strides(shape), note)


def _divided(element: Element, units: int, size: int, index: int) -> Cut:
    """Divide `units` indivisible units along the rule's dimension over `size` ranks; a remainder is left to the rule."""
    rule, shape = element.rule, element.shape
    assert rule is not None and rule.dimension is not None
    width, note = shape[rule.dimension] // units, ""
    if units % size == 0:
        low, high = units // size * index, units // size * (index + 1)
    elif rule.otherwise == "uneven":
        step = -(-units // size)
        low, high = min(step * index, units), min(step * (index + 1), units)
        note = f"{units} are not divisible by {rule.axis}={size}: split unevenly, at most {step} per rank"
    elif rule.otherwise == "replicate":
        low, high, note = 0, units, f"{units} are not divisible by {rule.axis}={size}: replicated on every rank"
    elif rule.otherwise == "largest":
        share = gcd(units, size)
        low, high = units // share * (index * share // size), units // share * (index * share // size + 1)
        note = (
            f"{units} are not divisible by {rule.axis}={size}: split into {share}, each replicated on {size // share} ranks"
        )
    else:
        what = f"{units} heads" if rule.units else f"{units} rows"
        raise StateMismatch(
            f"tensor {element.name!r}: {what} in dimension {rule.dimension} are not divisible by {rule.axis}={size}",
            hint=f"choose a {rule.axis} that divides {units}",
        )
    box = slab(shape, rule.dimension, low * width, high * width)
    return Cut(box, box.shape, strides(box.shape), note)
