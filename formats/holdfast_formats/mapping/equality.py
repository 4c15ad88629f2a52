"""Compares tensors of a foreign checkpoint by reading them in parts: equal ones, copies of one, and zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Box, Shape, flat_boxes, intersect, whole

COMPARED_BYTES = 2**23  # at once


def _go_on() -> None:
    """Before a part is read; it may raise, to stop."""


def equal(files: Files, one: ForeignTensor, other: ForeignTensor, before: Callable[[], None] = _go_on) -> bool:
    """Whether two tensors have the same dtype, shape and bytes: NaN equals itself."""
    spec = one.spec
    if (spec.dtype, spec.shape) != (other.spec.dtype, other.spec.shape):
        return False
    return all(
        _same_bits(*(fetched(files, each, part) for each in (one, other))) for part in _parts(spec.dtype, spec.shape, before)
    )


def zeros(files: Files, tensor: ForeignTensor, before: Callable[[], None] = _go_on) -> bool:
    """Whether a tensor has no other value than zero."""
    return not any(fetched(files, tensor, part).any() for part in _parts(tensor.spec.dtype, tensor.spec.shape, before))


def check_copy(source: Files, tensor: ForeignTensor, copy: ForeignPiece, before: Callable[[], None] = _go_on) -> None:
    """`StateMismatch`, with the key and both files, unless a copy has the same bytes as the tensor's own pieces."""
    spec, twin = tensor.spec, tensor._replace(pieces=(copy,), copies=())
    for part in _parts(spec.dtype, copy.box.shape, before):
        source_box = copy.box.place(part)
        if not _same_bits(fetched(source, tensor, source_box), fetched(source, twin, source_box)):
            first = next((piece.file for piece in tensor.pieces if intersect(piece.box, source_box) is not None), copy.file)
            what = f"tensor {spec.name!r} of group {spec.group!r} is stored in {first} and in {copy.file}"
            raise StateMismatch(
                f"{what}, with different values",
                hint="the source is inconsistent: use another checkpoint, or remove the wrong file",
                tensor=spec.name,
                files=[first, copy.file],
            )


def _parts(dtype: str, shape: Shape, before: Callable[[], None]) -> Iterator[Box]:
    """Boxes that tile a tensor, each of which is read at once."""
    volume, at_once = whole(shape).volume, max(COMPARED_BYTES * 8 // dtypes.bits(dtype), 1)
    for start in range(0, volume, at_once):
        before()
        yield from flat_boxes(start, min(start + at_once, volume), shape)


def _same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
