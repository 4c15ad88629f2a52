"""Compares stored tensors of a source: copies that must be equal, and tensors that a mapping assumes to be equal, or
zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Box, flat_boxes, intersect, whole
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped

COMPARED_BYTES = 2**23  # at once


def check_copy(source: Files, tensor: ForeignTensor, copy: ForeignPiece, going: CopyControl) -> None:
    """`StateMismatch`, with the key and both files, unless a copy has the same bytes as the tensor's own pieces."""
    spec, twin = tensor.spec, tensor._replace(pieces=(copy,), copies=())
    for part in _parts(spec.dtype, copy.box.shape, going):
        source_box = copy.box.place(part)
        if not _equal(fetched(source, tensor, source_box), fetched(source, twin, source_box)):
            first = next((piece.file for piece in tensor.pieces if intersect(piece.box, source_box) is not None), copy.file)
            what = f"tensor {spec.name!r} of group {spec.group!r} is stored in {first} and in {copy.file}"
            raise StateMismatch(
                f"{what}, with different values",
                hint="the source is inconsistent: take another checkpoint, or remove the file that is wrong",
                tensor=spec.name,
                files=[first, copy.file],
            )


def check_equal(
    source: Files, tensors: Mapping[TensorKey, ForeignTensor], equal: Iterable[Sequence[TensorKey]], going: CopyControl
) -> None:
    """`StateMismatch`, by name, unless the tensors of each group are equal, bit by bit."""
    for first, *others in equal:
        for other in others:
            ours, theirs = tensors[first], tensors[other]
            fit = (ours.spec.dtype, ours.spec.shape) == (theirs.spec.dtype, theirs.spec.shape)
            parts = _parts(ours.spec.dtype, ours.spec.shape, going) if fit else iter(())
            if not fit or not all(_equal(fetched(source, ours, part), fetched(source, theirs, part)) for part in parts):
                raise StateMismatch(
                    f"{first.name!r} and {other.name!r} of group {first.group!r} become one, but differ",
                    hint="the program does not fit this checkpoint",
                    tensor=other.name,
                )


def check_zeros(
    source: Files, tensors: Mapping[TensorKey, ForeignTensor], zeros: Iterable[TensorKey], going: CopyControl
) -> None:
    """`StateMismatch`, by name, unless these tensors have no other value than zero."""
    for key in zeros:
        spec = tensors[key].spec
        if any(fetched(source, tensors[key], part).any() for part in _parts(spec.dtype, spec.shape, going)):
            raise StateMismatch(
                f"{key.name!r} of group {key.group!r} is left out as zeros, but has other values",
                hint="the program does not fit this checkpoint",
                tensor=key.name,
            )


def _parts(dtype: str, shape: tuple[int, ...], going: CopyControl) -> Iterator[Box]:
    volume = whole(shape).volume
    at_once = max(COMPARED_BYTES * 8 // dtypes.bits(dtype), 1)
    for start in range(0, volume, at_once):
        if going.ended():
            raise CopyStopped
        yield from flat_boxes(start, min(start + at_once, volume), shape)


def _equal(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    """Bit by bit, so that NaN equals itself."""
    return np.array_equal(ours.reshape(-1).view(np.uint8), theirs.reshape(-1).view(np.uint8))
