"""Stretches of tensors as flat F32 arrays, and scans over whole tensors in blocks of a fixed length.

Sums over a tensor are taken block by block, so no length of a chunk, of a band or of a file changes a bit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.foreign.listing import FetchBox, ForeignTensor
from holdfast_formats.region import flat_boxes

BLOCK_ELEMENTS = 2**20

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


class Block(NamedTuple):
    """Elements [start, start + n) of each input of a merge, in the order of the recipe's models, the base last."""

    start: int
    values: Sequence[Floats]


Scan = Callable[[], Iterator[Block]]  # every call reads the whole tensor once, in order


class Formula(Protocol):
    """The arithmetic of one merged tensor, once it knows what it has to know of the whole tensor."""

    @property
    def row(self) -> int:
        """Stretches begin and end at multiples of so many elements."""

    def prepare(self, scan: Scan) -> None:
        """Find out, by as many scans as it takes, what depends on the whole tensor."""

    def merge(self, block: Block) -> Floats:
        """The merged elements of a stretch."""


class Terms(Protocol):
    """What defines a merged tensor besides its inputs. Its `repr` tells it from any other."""

    def begin(self, shape: tuple[int, ...]) -> Formula:
        """A formula for a tensor of this shape that has seen nothing yet."""


def flat(fetch: FetchBox, tensor: ForeignTensor, start: int, stop: int) -> Floats:
    """Elements [start, stop) of a tensor, row-major, in F32."""
    parts: list[NDArray[Any]] = [fetch(tensor, box).reshape(-1) for box in flat_boxes(start, stop, tensor.spec.shape)]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.float32)
    with np.errstate(invalid="ignore"):
        return joined.astype(np.float32, copy=False)


def blocks(elements: int, length: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of blocks of `length` elements; the last one may be shorter."""
    for start in range(0, elements, length):
        yield start, min(start + length, elements)


def total(values: NDArray[Any]) -> float:
    """The sum of a block in float64."""
    return float(np.sum(values, dtype=np.float64))
