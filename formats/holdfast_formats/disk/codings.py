"""Codings: how tensors of a compact checkpoint are stored in fewer bytes (docs/format.md § 3), as integers and arrays alone.

    bf16      NAME.bf16                     F32 rounded to bfloat16, to the nearest, ties to even
    int8      NAME.q8, NAME.q8.scale        first moments: sign and square root, of the largest magnitude of a block
    int8-log  NAME.q8log, NAME.q8log.range  second moments: steps between the bits of a block's least and greatest value
    low16     NAME.low16, NAME.low16.ties   a master's low bits, where the BF16 weight is the master rounded: lossless

Blocks are 256 elements of the last dimension; the last of a row may be shorter. Decoding uses exact integers and single
correctly rounded operations, so every processor gets the same bits. Encoding what was decoded gives the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, Shape

BLOCK = 256  # elements of the last dimension that share a scale
LOSSLESS = frozenset({"low16"})
TIES = "ties"
MODEL = "model"
_TOP = 127
_STEPS = 254  # of a logarithmic code: 1 to 255; 0 is zero
_HALF = 0x8000

Arrays = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]


class CodedPart(NamedTuple):
    """One part of a coded tensor: its name's suffix, its dtype, and whether it has elements or blocks."""

    suffix: str
    dtype: str
    a_block: int = 0  # values for each block, 0: one for each element; 1: no dimension for them


PARTS: dict[str, dict[str, CodedPart]] = {
    "bf16": {"codes": CodedPart(".bf16", "BF16")},
    "int8": {"codes": CodedPart(".q8", "I8"), "scale": CodedPart(".q8.scale", "F32", 1)},
    "int8-log": {"codes": CodedPart(".q8log", "U8"), "scale": CodedPart(".q8log.range", "F32", 2)},
    "low16": {"codes": CodedPart(".low16", "U16")},  # and, if there are any, TIES
}
TIES_PART = CodedPart(".low16.ties", "U64")


def part_shape(part: CodedPart, shape: Shape) -> Shape:
    if not part.a_block:
        return shape
    blocks = -(-shape[-1] // BLOCK)
    return (*shape[:-1], blocks) if part.a_block == 1 else (*shape[:-1], blocks, part.a_block)


def part_box(part: CodedPart, box: Box) -> Box:
    """The box of a part that is needed to decode a box of the tensor."""
    if not part.a_block:
        return box
    first, stop = box.offset[-1] // BLOCK, -(-(box.offset[-1] + box.shape[-1]) // BLOCK)
    offset, shape = (*box.offset[:-1], first), (*box.shape[:-1], max(stop - first, 0))
    return Box(offset, shape) if part.a_block == 1 else Box((*offset, 0), (*shape, part.a_block))


def encode(coding: str, values: Floats) -> dict[str, NDArray[Any]]:
    """The parts of finite F32 values, whose last dimension begins at a block. For `low16` use `split`."""
    if coding == "bf16":
        return {"codes": values.astype(ml_dtypes.bfloat16)}
    dtype, size = (np.int8, 1) if coding == "int8" else (np.uint8, 2)
    codes: NDArray[Any] = np.empty(values.shape, dtype)
    scale = np.empty((*values.shape[:-1], -(-values.shape[-1] // BLOCK), size), np.float32)
    one = _signed if coding == "int8" else _logarithmic
    for elements, blocks, block in _blocks(values):
        block_codes, scale[..., blocks, :] = one(block)
        codes[..., elements] = block_codes.reshape(*values.shape[:-1], -1)
    return {"codes": codes, "scale": scale[..., 0] if size == 1 else scale}


def slabs(box: Box, elements: int) -> Iterator[Box]:
    """Cut a box, in order, into boxes of about so many elements, the last dimension only at block boundaries."""
    cut = next((d for d in range(len(box.shape)) if box.shape[d] > 1), None)
    if box.volume <= elements or cut is None:
        yield box
        return
    inner, last = prod(box.shape[cut + 1 :]), cut == len(box.shape) - 1
    rows = max(elements // max(inner, 1), 1)
    rows = max(rows // BLOCK, 1) * BLOCK if last else rows
    at, stop = box.offset[cut], box.offset[cut] + box.shape[cut]
    while at < stop:
        upto = min(at - at % BLOCK + rows if last else at + rows, stop)
        part = Box((*box.offset[:cut], at, *box.offset[cut + 1 :]), (*box.shape[:cut], upto - at, *box.shape[cut + 1 :]))
        if part.volume > elements and not last and upto - at == 1:
            yield from slabs(part, elements)
        else:
            yield part
        at = upto


def _blocks(values: Floats) -> Iterator[tuple[slice, slice, Floats]]:
    """The whole blocks of all rows, and the short ones at their ends: slices of elements and blocks, values as (…,
    blocks, elements).
    """
    width = values.shape[-1]
    whole = width // BLOCK
    if whole:
        yield (
            slice(0, whole * BLOCK),
            slice(0, whole),
            values[..., : whole * BLOCK].reshape(*values.shape[:-1], whole, BLOCK),
        )
    if width % BLOCK:
        yield slice(whole * BLOCK, width), slice(whole, whole + 1), values[..., None, whole * BLOCK :]


def _signed(block: Floats) -> tuple[NDArray[np.int8], Floats]:
    top = np.abs(block).max(axis=-1, keepdims=True)
    share = np.abs(block).astype(np.float64) / np.where(top == 0, 1, top).astype(np.float64)
    codes = np.rint(_TOP * np.sqrt(share)).astype(np.int8)
    return np.where(np.signbit(block), -codes, codes).astype(np.int8), top


def _logarithmic(block: Floats) -> tuple[NDArray[np.uint8], Floats]:
    bits = np.abs(block).view(np.uint32).astype(np.int64)  # in the order of the values, and about their logarithm
    high = bits.max(axis=-1, keepdims=True)
    low = np.where(bits > 0, bits, high).min(axis=-1, keepdims=True)
    span = np.maximum(high - low, 1)
    codes = np.where(bits > 0, 1 + (2 * _STEPS * (bits - low) + span) // (2 * span), 0).astype(np.uint8)
    return codes, np.concatenate([low, high], axis=-1).astype(np.uint32).view(np.float32)


def decode(coding: str, box: Box, shape: Shape, parts: Arrays) -> Floats:
    """The values of a box of a tensor of `shape`, from the boxes of its parts that `part_box` names; all of `ties`.

    Raises `StateMismatch` for ties outside of the tensor.
    """
    codes = parts["codes"]
    if coding == "bf16":
        return codes.astype(np.float32)
    if coding == "low16":
        return join(codes, parts[MODEL], _marked(box, shape, parts.get(TIES))).view(np.float32)
    at = np.arange(box.offset[-1], box.offset[-1] + box.shape[-1]) // BLOCK - box.offset[-1] // BLOCK
    if coding == "int8":
        signed = codes.astype(np.int64)
        exact = (signed * np.abs(signed)).astype(np.float64) * parts["scale"][..., at].astype(np.float64)
        return (exact / (_TOP * _TOP)).astype(np.float32)
    ends = np.ascontiguousarray(parts["scale"]).view(np.uint32).astype(np.int64)[..., at, :]
    low, span, steps = ends[..., 0], ends[..., 1] - ends[..., 0], codes.astype(np.int64) - 1
    bits = np.where(codes > 0, low + (2 * steps * span + _STEPS) // (2 * _STEPS), 0)
    return bits.astype(np.uint32).view(np.float32)


def split(master: NDArray[np.uint32], weight: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], NDArray[np.bool_]] | None:
    """A master's low bits, and where it is exactly half-way and was rounded up; None unless every weight is its master
    rounded to nearest even, bit for bit.
    """
    wide = master.astype(np.uint64)
    high = wide >> 16
    if not np.array_equal((wide + 0x7FFF + (high & 1)) >> 16, weight.astype(np.uint64)):
        return None
    low = (wide & 0xFFFF).astype(np.uint16)
    return low, (low == _HALF) & (high & 1 == 1)


def join(low: NDArray[np.uint16], weight: NDArray[np.uint16], ties: NDArray[np.bool_] | None) -> NDArray[np.uint32]:
    """The masters that `split` took apart. A low half above the middle was rounded up; in the middle, `ties` decide."""
    high = weight.astype(np.uint32) - (low > _HALF)
    if ties is not None:
        high -= ties
    array: NDArray[np.uint32] = (high.astype(np.uint32) << np.uint32(16)) | low.astype(np.uint32)
    return array


def _marked(box: Box, shape: Shape, ties: NDArray[Any] | None) -> NDArray[np.bool_] | None:
    """Mask of a box's elements in this list of row-major indices of the whole tensor."""
    if ties is None or not len(ties):
        return None
    if int(ties.max()) >= prod(shape):
        raise StateMismatch(f"a list of ties names element {int(ties.max())} of a tensor of {prod(shape)}")
    marked = np.zeros(box.shape, np.bool_)
    index = np.unravel_index(ties.astype(np.int64), shape)
    local = [axis - first for axis, first in zip(index, box.offset, strict=True)]
    inside = np.ones(len(ties), np.bool_)
    for axis, size in zip(local, box.shape, strict=True):
        inside &= (axis >= 0) & (axis < size)
    marked[tuple(axis[inside] for axis in local)] = True
    return marked
