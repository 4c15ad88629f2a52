"""Checks a value as a whole: nothing contains itself, nothing is deep, and shared parts do not multiply.

A few bytes that refer to each other can represent more values than fit memory, or endless ones. After this check a caller
may walk through everything, recursively, as if nothing was shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from holdfast_service.wings.convert.foreign.pickled.calls import LatinBytes, NumpyDtype, Unfit
from holdfast_service.wings.convert.foreign.pickled.values import (
    LatinArray,
    PickledArray,
    PickledBytes,
    PickledGlobal,
    PickledOpaque,
    PickledRecord,
)

DEPTH_MAX = 100
VALUES_MAX = 2**24  # counted as often as a walk meets them
NODE_BYTES = 120  # what is noted of a container
_SMALL = 16
_PLAIN = (str, int, float, bool, complex, type(None))
_PLACES = (PickledArray, LatinArray, PickledBytes, PickledGlobal, PickledOpaque, LatinBytes, NumpyDtype)
_LEAVES: frozenset[type] = frozenset((*_PLAIN, *_PLACES))


class _Measured(NamedTuple):
    values: int
    height: int


class _Entered:
    """A container between the root and the current position of the walk."""

    __slots__ = ("height", "key", "left", "values")

    def __init__(self, value: Any) -> None:
        self.key, self.left = id(value), _parts(value)
        self.values, self.height = 1, 1

    def next_container(self, known: dict[int, _Measured | None], depth: int) -> Any:
        """The next unvisited part; None at the end."""
        for part in self.left:
            kind = type(part)
            if kind in _LEAVES:
                self.values += 1
            elif kind is tuple and len(part) <= _SMALL and all(type(one) in _LEAVES for one in part):
                self.add(1 + len(part), 1, depth)
            elif id(part) not in known:
                return part
            else:
                measured = known[id(part)]
                if measured is None:
                    raise Unfit("has a value that contains itself")
                self.add(measured.values, measured.height, depth)
        return None

    def add(self, values: int, height: int, depth: int) -> None:
        self.values += values
        self.height = max(self.height, height + 1)
        if self.values > VALUES_MAX:
            raise Unfit(f"expands to over {VALUES_MAX} values")
        if depth + height > DEPTH_MAX:
            raise Unfit(f"has values that are nested more than {DEPTH_MAX} deep")


def check(root: Any, charge: Callable[[int], None]) -> None:
    """`Unfit` unless the value is a tree of limited size and depth; `charge` is called with the memory that this takes."""
    if type(root) in _LEAVES:
        return
    known: dict[int, _Measured | None] = {id(root): None}
    path = [_Entered(root)]
    while path:
        inner = path[-1].next_container(known, len(path))
        if inner is None:
            done = path.pop()
            known[done.key] = _Measured(done.values, done.height)
            if path:
                path[-1].add(done.values, done.height, len(path))
            continue
        charge(NODE_BYTES)
        known[id(inner)] = None
        path.append(_Entered(inner))
        if len(path) > DEPTH_MAX:
            raise Unfit(f"has values that are nested more than {DEPTH_MAX} deep")


def _parts(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is dict:
        return chain(value, value.values())
    if kind is PickledRecord:
        return iter((value.args, value.state, value.items))
    if kind in (list, tuple, set, frozenset):
        return iter(value)
    raise Unfit("has an array without values")
