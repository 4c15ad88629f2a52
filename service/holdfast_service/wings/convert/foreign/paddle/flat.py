"""Joins tensors that Paddle's sharding cut out of a flat buffer.

Every parameter has a slot in the buffer, padded at its end, and every rank an equal part of the buffer. A rank's array of a
parameter is the overlap of its part with the slot: only padding follows the last element.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignPiece
from holdfast_formats.region import Shape
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray


def assembled(slices: Sequence[StoredArray], shape: Shape) -> LocalTensorParts:
    """The tensor of `shape` of these flat slices, in order, without the padding.

    Raises `StateMismatch` if they are not flat, or too short.
    """
    first, wanted, at = slices[0], prod(shape), 0
    pieces: list[ForeignPiece] = []
    for one in slices:
        if len(one.shape) != 1 or one.dtype != first.dtype:
            raise one.odd(f"it is not a flat slice of {first.dtype}")
        length = min(one.shape[0], wanted - at)
        if length > 0:
            pieces += one.run(0, at, at + length, shape)
        at += one.shape[0]
    if at < wanted:
        raise StateMismatch(
            f"{first.file}: {first.key!r} has {at} elements in {len(slices)} slices, but shape {list(shape)} needs {wanted}",
            hint="copy the files of all ranks: one is missing, or the model's shapes belong to another model",
            file=first.file,
            tensor=first.key,
        )
    return LocalTensorParts(first.dtype, shape, tuple(pieces), (), first.file, first.key)
