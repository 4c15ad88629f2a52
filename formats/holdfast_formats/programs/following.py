"""Tensors that follow a parameter: masters and averages, element-wise optimizer state, and counts like `/step`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import NamedTuple

import ml_dtypes

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs.arrangement import Arrangement
from holdfast_formats.programs.compiled import CompiledProgram, DtypeChange, LostElements
from holdfast_formats.programs.environment import Environment
from holdfast_formats.region import Shape, whole
from holdfast_formats.tensors import TensorSpec


class Plane(NamedTuple):
    """One tensor of every parameter: those of a group whose names have this end."""

    group: str
    end: str


Planes = Mapping[Plane, Mapping[str, TensorSpec]]


class FollowingTensors:
    """Makes the tensors of each plane as the program arranged the parameters."""

    def __init__(self, around: Environment, parameters: Mapping[str, Shape]) -> None:
        self._around, self._parameters = around, parameters
        self._tensors: dict[TensorKey, MappedTensor] = {}
        self._casts: list[DtypeChange] = []
        self._equal: dict[tuple[TensorKey, ...], None] = {}
        self._added: list[TensorKey] = []

    def planes(self, planes: Planes) -> CompiledProgram:
        """All of them; `StateMismatch` for a tensor that does not fit its parameter."""
        for plane, held in planes.items():
            for name, one in self._around.held.items():
                self._follow(plane, held, name, one)
        lost = [*self._dropped(planes), *self._cut_away(planes)]
        return CompiledProgram(
            program="",
            tensors=self._tensors,
            lost=tuple(lost),
            added=tuple(self._added),
            casts=tuple(self._casts),
            equal=tuple(self._equal),
            zeros=tuple(self._asserted(planes)),
            names=self._names(),
            arranged=self._around.held,
            notes=tuple(f"{name!r} is used more than once" for name in dict.fromkeys(self._around.copied)),
        )

    def _follow(self, plane: Plane, held: Mapping[str, TensorSpec], name: str, one: Arrangement) -> None:
        if not one.moves:
            self._add(plane, held, name, one)
            return
        moves, group, end = one.moves, plane.group, plane.end
        first = held.get(moves[0].source.name)
        if len(moves) == 1:
            if first is None:
                return
            sources: tuple[str, ...] = (moves[0].source.name,)
        else:
            sources = one.sources
            found = [source for source in sources if source in held]
            if not found:
                return
            if len(found) < len(sources):
                missing = next(source for source in sources if source not in held) + end
                raise StateMismatch(
                    f"{name + end!r} is made of {found[0] + end!r} and {missing!r}, which is not in group {group}",
                    hint="give every part such a tensor, or leave the optimizer and the averages out",
                    tensor=missing,
                )
            first = held[sources[0]]
        assert first is not None  # it is among the found
        if first.shape != self._parameters[sources[0]]:
            self._count(plane, held, name, one)
            return
        dtype = self._dtype(plane, [held[source] for source in sources], name, one)
        if end or group != moves[0].source.group:
            moves = tuple(
                BoxMove(TensorKey(group, m.source.name + end), m.box, m.target, m.axes, m.step, m.target_step) for m in moves
            )
        for other in sources[1:]:
            if held[other].shape != self._parameters[other]:
                raise _odd(plane, held[other], self._parameters[other])
        self._make(MappedTensor(TensorSpec(group, name + end, dtype, one.shape), moves, one.padded))
        for names in one.same:
            present = tuple(TensorKey(group, each + end) for each in names if each in held)
            if len(present) > 1:
                self._equal[present] = None

    def _make(self, mapped: MappedTensor) -> None:
        mapped.spec.check()
        self._tensors[mapped.key] = mapped

    def _add(self, plane: Plane, held: Mapping[str, TensorSpec], name: str, one: Arrangement) -> None:
        """Add a new tensor: zeros, among weights, masters and averages; an optimizer makes its own state."""
        if plane.end or not held:
            return
        if name not in self._around.added:
            raise StateMismatch(f"{name!r} would be nothing but padding", hint="pad it after slicing", tensor=name)
        dtype = one.dtype if plane.group == "model" else next(iter(held.values())).dtype
        if dtype is None:
            raise StateMismatch(
                f"{self._around.added[name]}: dtype= is missing", hint='_ -> name, shape=[…], dtype="float32"'
            )
        self._make(MappedTensor(TensorSpec(plane.group, name, dtype, one.shape), (), True))
        self._added.append(TensorKey(plane.group, name))

    def _count(self, plane: Plane, held: Mapping[str, TensorSpec], name: str, one: Arrangement) -> None:
        """Add a tensor that is not element-wise: one number for a whole parameter, or anything of a renamed one."""
        specs = [held[source] for source in one.sources]
        first = specs[0]
        renamed = one.moves == (
            BoxMove(one.moves[0].source, whole(one.shape), whole(one.shape), tuple(range(len(one.shape)))),
        )
        single = all(prod(spec.shape) == 1 and (spec.shape, spec.dtype) == (first.shape, first.dtype) for spec in specs)
        if not plane.end or (not single and not renamed):
            raise _odd(plane, first, self._parameters[one.sources[0]])
        key = TensorKey(plane.group, first.name)
        box = whole(first.shape)
        move = BoxMove(key, box, box, tuple(range(len(first.shape))))
        self._make(MappedTensor(TensorSpec(plane.group, name + plane.end, first.dtype, first.shape), (move,)))
        if len(specs) > 1:
            self._equal[tuple(TensorKey(plane.group, spec.name) for spec in specs)] = None

    def _dtype(self, plane: Plane, specs: list[TensorSpec], name: str, one: Arrangement) -> str:
        """A tensor's dtype: its sources', or in group `model` the one of a cast."""
        casting = one.dtype is not None and plane.group in ("model", "adapter")
        if not casting:
            others = {spec.dtype for spec in specs}
            if len(others) > 1:
                raise StateMismatch(
                    f"{name + plane.end!r} is made of tensors of different dtypes: "
                    + ", ".join(f"{spec.name!r} is {spec.dtype}" for spec in specs[:4]),
                    hint="dtype= casts them",
                    tensor=name + plane.end,
                )
            return specs[0].dtype
        assert one.dtype is not None  # casting
        for before in dict.fromkeys(spec.dtype for spec in specs if spec.dtype != one.dtype):
            self._casts.append(
                DtypeChange(TensorKey(plane.group, name), before, one.dtype, lossless(before, one.dtype, name))
            )
        return one.dtype

    def _dropped(self, planes: Planes) -> list[LostElements]:
        used = {source for one in self._around.held.values() for source in one.sources}
        return [
            LostElements(TensorKey(plane.group, spec.name), prod(spec.shape), why)
            for plane, held in planes.items()
            for name, why in self._around.dropped.items()
            if name not in used and (spec := held.get(name)) is not None
        ]

    def _cut_away(self, planes: Planes) -> list[LostElements]:
        """Elements that slices drop; everything else is fully used."""
        used: dict[str, int] = {}
        for one in self._around.held.values():
            for move in one.moves:
                used[move.source.name] = used.get(move.source.name, 0) + move.box.volume
            for names in one.same:
                used |= {each: prod(self._parameters[each]) for each in names}
        lost = []
        for name, shape in self._parameters.items():
            left = prod(shape) - used.get(name, 0)
            if left <= 0 or (name in self._around.dropped and name not in used):
                continue
            why = self._around.sliced.get(name)
            if why is None:
                raise StateMismatch(
                    f"{left} elements of {name!r} would be lost",
                    hint="use the rest in a statement, drop the whole tensor with NAME -> _, or cut it with slice=",
                    tensor=name,
                )
            for plane, held in planes.items():
                if name in held and held[name].shape == shape:
                    lost.append(LostElements(TensorKey(plane.group, name + plane.end), left, why))
        return lost

    def _asserted(self, planes: Planes) -> list[TensorKey]:
        """Tensors that must be zero; also checks assumed dtypes."""
        zeros = []
        for name, dtype, where in self._around.asserted:
            for plane, held in planes.items():
                spec = held.get(name)
                if spec is None or spec.shape != self._parameters[name]:
                    continue
                if dtype is None:
                    zeros.append(TensorKey(plane.group, spec.name))
                elif plane.group == "model" and spec.dtype != dtype:
                    raise StateMismatch(
                        f"{where}: {name!r} is {spec.dtype}, not {dtype}",
                        hint="write src_dtype= as the checkpoint has it",
                        tensor=name,
                    )
        return zeros

    def _names(self) -> dict[str, tuple[str, ...]]:
        targets: dict[str, list[str]] = {name: [] for name in self._parameters}
        for name, one in self._around.held.items():
            for source in one.sources if len(one.moves) > 1 else [move.source.name for move in one.moves]:
                targets[source].append(name)
        return {name: tuple(targets_of) for name, targets_of in targets.items()}


def _odd(plane: Plane, spec: TensorSpec, shape: Shape) -> StateMismatch:
    return StateMismatch(
        f"{spec.name!r} of group {plane.group} has shape {list(spec.shape)}, but its parameter has {list(shape)}: it is "
        "not element-wise, so it cannot follow",
        hint="import without optimizer state, or with unchanged names",
        tensor=spec.name,
    )


@cache
def _float(dtype: str) -> tuple[int, float, float] | None:
    """Digits, largest and smallest number of a floating-point type; None for others."""
    numpy = dtypes.to_numpy(dtype)
    try:
        info = ml_dtypes.finfo(numpy)  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return int(info.nmant), float(info.max), float(info.smallest_subnormal)


@cache
def _exact(before: str, after: str) -> bool | None:
    """Whether every value of one type is one of the other; None if one of them is not floating-point."""
    small, large = _float(before), _float(after)
    if small is None or large is None:
        return None
    return small[0] <= large[0] and small[1] <= large[1] and small[2] >= large[2]


def lossless(before: str, after: str, name: str = "") -> bool:
    """Whether a cast keeps every value; `StateMismatch` for one between floating-point and whole numbers."""
    is_exact = before == after or _exact(before, after)
    if is_exact is None:
        raise StateMismatch(
            f"tensor {name!r} cannot be cast from {before} to {after}",
            hint="keep whole numbers as they are: leave dtype= out of the statement",
            tensor=name,
        )
    return is_exact
