"""Stretches of tensors as flat F32 arrays, and scans over whole tensors in blocks of a fixed length.

Sums over a tensor are taken block by block, so the lengths of chunks, bands and files change no bit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import flat_boxes

BLOCK_ELEMENTS = 2**18  # an array of it is a MiB in F32: several fit into a processor's cache

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Found = TypeVar("Found")


class Workspace:
    """Named arrays that one thread reuses block after block: the kernel would have to clear new ones each time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], NDArray[Any]] = {}

    def array(self, name: str, count: int, dtype: Any) -> NDArray[Any]:
        """`count` elements with arbitrary contents."""
        key = name, np.dtype(dtype).str
        held = self._held.get(key)
        if held is None or held.size < count:
            held = self._held[key] = np.empty(count, dtype)
        return held[:count]

    def floats(self, name: str, count: int) -> Floats:
        return self.array(name, count, np.float32)


class Workspaces:
    """The workspaces of a job, shared by its tensors: separate ones would be kept until the end."""

    def __init__(self) -> None:
        self._idle: list[Workspace] = []
        self._inputs = (Workspace(), Workspace())

    @contextmanager
    def taken(self) -> Iterator[Workspace]:
        try:
            space = self._idle.pop()
        except IndexError:
            space = Workspace()
        try:
            yield space
        finally:
            self._idle.append(space)

    def inputs(self, number: int) -> Workspace:
        """The memory for group `number` of a tensor's stretches, free once group `number` - 2 has been computed."""
        return self._inputs[number % 2]


class Block:
    """Elements [start, start + size) of each input of a merge, in the order of the recipe's models, the base last."""

    def __init__(self, number: int, start: int, stored: Sequence[NDArray[Any]], space: Workspace) -> None:
        """`stored` are in the dtypes of the inputs; `number` counts the blocks of a scan."""
        self.number, self.start, self.space, self._stored = number, start, space, stored
        self.size, self.inputs = stored[0].size if stored else 0, len(stored)

    def values(self, number: int, name: str = "values") -> Floats:
        """An input in F32, in the workspace under this name. Read-only."""
        stored = self._stored[number]
        if stored.dtype == np.float32:
            return stored
        floats = self.space.floats(name, self.size)
        np.copyto(floats, stored, casting="unsafe")
        return floats


class Scan(Protocol):
    """Reads a whole tensor once, or some of its blocks."""

    def __call__(self, measure: Callable[[Block], Found], numbers: Sequence[int] | None = None) -> Iterator[Found]:
        """The measurements of all blocks, in order. Several threads measure, each its own block; results must not be part of
        the block's workspace.
        """

    @property
    def blocks(self) -> int:
        """The number of blocks."""

    @property
    def length(self) -> int:
        """Elements of a block; the last one may have fewer."""


class Formula(Protocol):
    """The arithmetic of one merged tensor, once it knows its properties as a whole."""

    @property
    def row(self) -> int:
        """Stretches begin and end at multiples of so many elements."""

    def prepare(self, scan: Scan) -> None:
        """Compute what depends on the whole tensor, by as many scans as needed."""

    def merge(self, block: Block) -> Floats:
        """The merged elements of a stretch, perhaps in its workspace. Thread-safe."""


class Terms(Protocol):
    """The definition of a merged tensor besides its inputs, identified by its `repr`."""

    def begin(self, shape: tuple[int, ...]) -> Formula:
        """A new formula for a tensor of this shape."""


def read_flat(fetch: FetchBox, tensor: ForeignTensor, start: int, into: NDArray[Any]) -> None:
    """Fill an array in the tensor's dtype with the tensor's elements from `start` on, row-major."""
    at = 0
    for box in flat_boxes(start, start + into.size, tensor.spec.shape):
        fetch(tensor, box, into[at : at + box.volume].reshape(box.shape))
        at += box.volume


def total(values: NDArray[Any]) -> float:
    """The sum of a block in float64."""
    return float(np.sum(values, dtype=np.float64))
