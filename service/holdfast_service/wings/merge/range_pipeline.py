"""Works through stretches of tensors: one thread reads all inputs, several compute, and results come in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.wings.merge.scanning import Block, Found, Workspaces, read_flat

READ_BYTES = 2**24  # of all inputs together, read at once; as much again is being computed
THREADS_MAX = 4
WORK_BYTES_MAX = 2**27  # of the arrays that all threads compute in


class MergedPart(NamedTuple):
    """Elements [start, stop) of a tensor, and the number of the stretch."""

    number: int
    start: int
    stop: int


class RangePipeline:
    """Reads stretches of tensors of one shape, and computes a result for each. For one thread, which starts others."""

    def __init__(self, inputs: Sequence[ForeignTensor], longest: int, spaces: Workspaces) -> None:
        """No stretch has more than `longest` elements. The workspaces are used exclusively."""
        self._inputs, self._spaces = inputs, spaces
        width = sum(dtypes.to_numpy(one.spec.dtype).itemsize for one in inputs)
        self._read_elements = READ_BYTES // max(width, 1)
        copies = 2 * len(inputs) + 8  # in F32, of each stretch that is computed
        room = WORK_BYTES_MAX // (4 * copies * max(longest, 1))
        self._threads = max(min(room, THREADS_MAX, len(os.sched_getaffinity(0))), 1)

    def each(self, fetch: FetchBox, stretches: Sequence[MergedPart], act: Callable[[Block], Found]) -> Iterator[Found]:
        """`act`'s results for all stretches, in order; raises errors of the reader and of `act`."""
        if len(stretches) == 1 or self._threads == 1:
            for number, group in enumerate(self._groups(stretches)):
                yield from (self._act(act, stretch, stored) for stretch, stored in self._read(fetch, number, group))
            return
        pending: deque[tuple[int, Future[Found]]] = deque()
        pool = _pool(self._threads)
        try:
            for number, group in enumerate(self._groups(stretches)):
                while pending and pending[0][0] < number - 1:  # two groups are held at most: this one and the last
                    yield pending.popleft()[1].result()
                for stretch, stored in self._read(fetch, number, group):
                    pending.append((number, pool.submit(self._act, act, stretch, stored)))
            while pending:
                yield pending.popleft()[1].result()
        finally:
            for _, job in pending:
                job.cancel()
            wait([job for _, job in pending])  # no thread may compute into memory that the caller frees

    def _groups(self, stretches: Sequence[MergedPart]) -> Iterator[list[MergedPart]]:
        group: list[MergedPart] = []
        for one in stretches:
            if group and (one.start != group[-1].stop or one.stop - group[0].start > self._read_elements):
                yield group
                group = []
            group.append(one)
        if group:
            yield group

    def _read(
        self, fetch: FetchBox, number: int, group: Sequence[MergedPart]
    ) -> list[tuple[MergedPart, list[NDArray[Any]]]]:
        low, space = group[0].start, self._spaces.inputs(number)
        stored: list[NDArray[Any]] = []
        for place, one in enumerate(self._inputs):
            array = space.array(f"input {place}", group[-1].stop - low, dtypes.to_numpy(one.spec.dtype))
            read_flat(fetch, one, low, array)
            stored.append(array)
        return [(one, [array[one.start - low : one.stop - low] for array in stored]) for one in group]

    def _act(self, act: Callable[[Block], Found], stretch: MergedPart, stored: Sequence[NDArray[Any]]) -> Found:
        with self._spaces.taken() as space, np.errstate(over="ignore", invalid="ignore"):
            return act(Block(stretch.number, stretch.start, stored, space))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """A cached pool: new threads for each band would make malloc use more and more arenas."""
    return ThreadPoolExecutor(threads, "holdfast-merge", initializer=give_way)


def cut(start: int, stop: int, length: int) -> list[MergedPart]:
    """[start, stop) in stretches that end at multiples of `length`, numbered from the tensor's first element on."""
    firsts = range(start // length, -(-stop // length))
    return [MergedPart(at, max(at * length, start), min((at + 1) * length, stop)) for at in firsts]
