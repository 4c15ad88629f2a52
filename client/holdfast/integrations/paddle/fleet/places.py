"""Where the tensors that a rank keeps of a parameter lie in the whole parameter, as Fragments.

Tensor parallelism leaves a rank a box of the parameter. Sharding leaves its optimizer all of that, a range of the row-major
elements, or nothing. Matrices that each rank has fused by itself stand side by side in the whole, in the order of the ranks:
a model's program takes them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape

Declared = torch.Tensor | Fragment


class TensorCut(NamedTuple):
    """A dimension that `ranks` ranks divide evenly, of which this is number `rank`."""

    axis: int
    rank: int
    ranks: int


class ElementRange(NamedTuple):
    """The elements [start, stop) of a rank's row-major tensor of a parameter."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class ParameterPlace(NamedTuple):
    """The place of this rank's tensor of a parameter, whose shape is `local`, in the whole one.

    `name` is the stored one; `cut` is None if the tensor is whole. Of a `turned` matrix, this is the place of Paddle's
    tensor transposed, as it is stored.
    """

    name: str
    local: Shape
    cut: TensorCut | None = None
    turned: bool = False

    def transposed(self) -> ParameterPlace:
        """The place of a matrix that is stored transposed."""
        cut = None if self.cut is None else self.cut._replace(axis=1 - self.cut.axis)
        return self._replace(local=self.local[::-1], cut=cut, turned=not self.turned)

    @property
    def shape(self) -> Shape:
        """That of the whole parameter."""
        if self.cut is None:
            return self.local
        return tuple(size * self.cut.ranks if axis == self.cut.axis else size for axis, size in enumerate(self.local))

    @property
    def offset(self) -> Shape:
        """The corner of this rank's box."""
        at = [0] * len(self.local)
        if self.cut is not None:
            at[self.cut.axis] = self.cut.rank * self.local[self.cut.axis]
        return tuple(at)

    def of(self, tensor: torch.Tensor) -> Declared:
        """What to store of a tensor with the local shape: itself if it is whole."""
        return tensor if self.cut is None else Fragment(tensor.detach(), self.shape, offset=self.offset, held=tensor)

    def span_of(self, tensor: torch.Tensor, span: ElementRange) -> Declared:
        """What to store of a flat tensor that begins with these elements; what follows them is padding.

        Raises `InvalidRequest` for a tensor that is too short, and for a matrix that is stored transposed.
        """
        if self.turned:
            raise InvalidRequest(
                f"{self.name} is stored as PEFT has it, transposed, and sharding has divided its elements among ranks",
                hint="train an adapter without split_param and stage 3, which save little here",
                tensor=self.name,
            )
        if tensor.dim() != 1 or tensor.numel() < span.size or span.stop > prod(self.local):
            raise InvalidRequest(
                f"{self.name}: a tensor of shape {list(tensor.shape)} does not hold the elements {list(span)} of a "
                f"parameter of shape {list(self.local)}",
                hint="save without this optimizer: save(groups=…)",
            )
        part = tensor.detach()[: span.size]
        if not span.size:
            return empty(self.shape, tensor.dtype)
        if self.cut is None:
            return Fragment(part, self.shape, flat=span)
        return Fragment(part, self.shape, offset=self.offset, box=self.local, flat=span)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Fragment:
    """No element of a tensor of this shape, which other ranks hold."""
    return Fragment(torch.empty(0, dtype=dtype), shape, flat=(0, 0))


def slice_of(index: int, size: int, begin: int, end: int) -> ElementRange:
    """The elements of a parameter of `size` elements at `index` of a padded buffer, of which a rank has [begin, end).

    Paddle gives `end` before `begin` to a rank that has none.
    """
    start = min(max(begin - index, 0), size)
    return ElementRange(start, min(max(end - index, start), size))
