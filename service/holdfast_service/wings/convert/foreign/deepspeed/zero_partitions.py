"""Where the elements of each parameter are in ZeRO's flat partitions, by the arithmetic of DeepSpeed's `zero_to_fp32`.

Stages 1 and 2: the parameters of a group follow each other in one flat tensor, which is cut into one partition for each
rank. Stage 3: every parameter is cut into equal parts, of which each rank holds one; a rank's parts follow each other in
flat tensors, one for each sub-group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignPiece
from holdfast_formats.region import Shape
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

Lanes = Sequence[Sequence[StoredArray]]  # arrays that follow each other, for each group (stages 1 and 2) or rank (3)


class FlatRun(NamedTuple):
    """Elements [start, stop) of a parameter, contiguous from `first` on in the lane's concatenated arrays."""

    lane: int
    first: int
    start: int
    stop: int


class FlatParameter(NamedTuple):
    """A parameter, the group or sub-group of its optimizer state, and its elements' places."""

    name: str
    shape: Shape
    group: int
    runs: tuple[FlatRun, ...]


def by_group(
    groups: Sequence[Mapping[str, Shape]], paddings: Sequence[Sequence[int]] | None, lanes: Lanes
) -> list[FlatParameter]:
    """The parameters of stages 1 and 2. `StateMismatch` if the partitions' lengths are not DeepSpeed's."""
    parameters = []
    for group, (shapes, arrays) in enumerate(zip(groups, lanes, strict=True)):
        inner = paddings[group] if paddings is not None else [0] * len(shapes)
        offset = 0
        for (name, shape), padding in zip(shapes.items(), inner, strict=True):
            run = FlatRun(group, offset, 0, prod(shape))
            parameters.append(FlatParameter(name, shape, group, (run,)))
            offset += prod(shape) + padding
        held, align = sum(array.shape[0] for array in arrays), 2 * len(arrays)
        if ceil(offset / align) != ceil(held / align):
            raise _wrong(arrays[0], f"group {group} has {held} elements in all partitions, but its parameters have {offset}")
    return parameters


def by_rank(shapes: Mapping[str, Shape], lanes: Lanes) -> list[FlatParameter]:
    """The parameters of stage 3. `StateMismatch` if the partitions' lengths are not DeepSpeed's."""
    parameters = []
    offset, world = 0, len(lanes)
    ends = [sum(array.shape[0] for array in lanes[0][: n + 1]) for n in range(len(lanes[0]))]
    for name, shape in shapes.items():
        numel = prod(shape)
        share = ceil(numel / world)
        runs = (FlatRun(rank, offset, rank * share, min((rank + 1) * share, numel)) for rank in range(world))
        group = next((n for n, end in enumerate(ends) if offset < end), 0)
        parameters.append(FlatParameter(name, shape, group, tuple(run for run in runs if run.start < run.stop)))
        offset += share
    for rank, arrays in enumerate(lanes):
        held = sum(array.shape[0] for array in arrays)
        if held != offset or [len(array.shape) for array in arrays] != [1] * len(ends):
            raise _wrong(arrays[0], f"rank {rank} has {held} elements, but its shares of the parameters have {offset}")
    return parameters


def pieces(parameter: FlatParameter, lanes: Lanes) -> tuple[ForeignPiece, ...]:
    """The pieces that tile the parameter; `StateMismatch` if a lane's arrays end too early."""
    return tuple(piece for run in parameter.runs for piece in _cut(parameter, run, lanes[run.lane]))


def _cut(parameter: FlatParameter, run: FlatRun, arrays: Sequence[StoredArray]) -> Iterable[ForeignPiece]:
    at = filled = 0
    last = run.first + run.stop - run.start
    for array in arrays:
        low, high = max(run.first, at), min(last, at + array.shape[0])
        if low < high:
            shift = run.start - run.first
            yield from array.run(low - at, low + shift, high + shift, parameter.shape)
            filled += high - low
        at += array.shape[0]
    if filled != run.stop - run.start:
        raise _wrong(
            arrays[-1], f"{run.stop - run.start - filled} elements of parameter {parameter.name!r} are in no partition"
        )


def _wrong(array: StoredArray, what: str) -> Exception:
    return StateMismatch(
        f"{array.file}: {what}",
        hint="the files belong to different checkpoints, or some are missing: copy all files of one checkpoint",
        file=array.file,
    )
