"""Leaves keys of a pickled value out, by their paths in the file: `optimizer`, `hyper_parameters.cfg`, `states[1]`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from holdfast_formats import dtypes
from holdfast_formats.errors import LimitExceeded
from holdfast_formats.mapping.listing import PartLeftOut
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.leaving_out import LeftOutParts
from holdfast_service.wings.convert.foreign.pickles import AnyArray, PickledRecord

COPIED_MAX = 2**20  # items of containers that lose some: parts of a pickle may be shared, and are copied each time


class PrunedValue:
    """A value without the keys that match. `left_out` lists them; the value itself is not changed."""

    def __init__(self, value: Any, options: ReadOptions, file: str) -> None:
        self._left, self._file, self._copied = LeftOutParts(options), file, 0
        self.value = self._pruned(value, "") if options.leave_out else value

    @property
    def left_out(self) -> tuple[PartLeftOut, ...]:
        return self._left.parts

    def _pruned(self, value: Any, path: str) -> Any:
        if type(value) is PickledRecord and type(value.state) is dict:
            state = self._pruned(value.state, path)
            if state is value.state:
                return value
            record = PickledRecord(value.name, value.args)
            record.build(state)
            return record
        if type(value) is dict:
            kept = {key: one for key, one in value.items() if not self._left.takes_key(_inner(path, key), _sizes(one))}
            made = {key: self._pruned(one, _inner(path, key)) for key, one in kept.items()}
            return self._copy(value, made, all(one is value[key] for key, one in made.items()))
        if type(value) in (list, tuple):
            items = [
                (number, one)
                for number, one in enumerate(value)
                if not self._left.takes_key(f"{path}[{number}]", _sizes(one))
            ]
            inner = [self._pruned(one, f"{path}[{number}]") for number, one in items]
            return self._copy(value, type(value)(inner), all(a is b for a, (_, b) in zip(inner, items, strict=True)))
        return value

    def _copy(self, value: Any, made: Any, same: bool) -> Any:
        if same and len(made) == len(value):
            return value
        self._copied += len(value)
        if self._copied > COPIED_MAX:
            raise LimitExceeded(
                f"{self._file} has over {COPIED_MAX} values beside those that are left out",
                hint="leave out the key around them",
                file=self._file,
            )
        return made


def _inner(path: str, key: Any) -> str:
    return f"{path}.{str(key)[:80]}" if path else str(key)[:80]


def _sizes(value: Any) -> Iterator[int]:
    """The bytes of each array in a value."""
    if isinstance(value, AnyArray):
        yield prod(value.shape) * dtypes.bits(value.dtype) // 8
    elif type(value) is dict:
        for one in value.values():
            yield from _sizes(one)
    elif type(value) in (list, tuple):
        for one in value:
            yield from _sizes(one)
