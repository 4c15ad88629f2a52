"""Decodes optimizer state that Paddle quantised when it saved (`ckpt_quant_stage`), in Paddle's layout.

O1 keeps a byte of each moment and scales for each column, O2 four bits of each moment in one byte, and scales for every 32
rows of a column. Rounding errors stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box, Shape
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

FIRST, SECOND = "moment1_0", "moment2_0"
SCALES, LOWEST, HIGHEST = "moment1_0@scales", "moment2_0@min_scales", "moment2_0@max_scales"
GROUP_ROWS = 32  # of O2
_EPSILON = 1e-8


class Bytes(NamedTuple):
    """O1: a byte for each value; computed in float64, and rounded to F32."""

    codes: ForeignTensor
    scales: tuple[ForeignTensor, ...]  # s, or lo and hi

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.codes, *self.scales)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        codes = fetch(self.codes, box).astype(np.float64)
        scales = [self._scale(one, box, fetch) for one in self.scales]
        if len(scales) == 1:
            return np.asarray(codes / 127 * scales[0], np.float32)
        with np.errstate(divide="ignore", over="ignore"):
            return np.asarray(_second(codes / 255, scales[0], scales[1]), np.float32)

    @staticmethod
    def _scale(scale: ForeignTensor, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """One number for all, or one for each index of dimension 1."""
        if not scale.spec.shape:
            return fetch(scale, Box((), ())).astype(np.float64)
        scales = fetch(scale, Box(box.offset[1:2], box.shape[1:2])).astype(np.float64)
        return scales.reshape(1, -1, *(1,) * (len(box.shape) - 2))


class HalfBytes(NamedTuple):
    """O2: both moments in one byte; computed in F32."""

    codes: ForeignTensor
    scales: tuple[ForeignTensor, ...]  # s, or lo and hi

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.codes, *self.scales)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        both = fetch(self.codes, box).view(np.uint8)
        scales = [self._scale(one, box, fetch) for one in self.scales]
        if len(scales) == 1:
            high = (both >> 4).astype(np.int8)
            signed = np.where(high > 7, high - 16, high).astype(np.float32)
            return np.asarray(signed * scales[0] / np.float32(7))  # as Paddle does: the order decides the last bit
        with np.errstate(divide="ignore", over="ignore"):
            return _second((both & 15).astype(np.float32) / np.float32(15), scales[0], scales[1])

    @staticmethod
    def _scale(scale: ForeignTensor, box: Box, fetch: FetchBox) -> NDArray[Any]:
        (row, column), (rows, columns) = box
        first, last = row // GROUP_ROWS, -(-(row + rows) // GROUP_ROWS)
        scales = fetch(scale, Box((first, column), (last - first, columns)))
        return np.asarray(scales[np.arange(row, row + rows) // GROUP_ROWS - first])


def _second(part: NDArray[Any], lowest: NDArray[Any], highest: NDArray[Any]) -> NDArray[Any]:
    """The second moment, from its inverse root, interpolated between the lowest and the highest."""
    one, epsilon = part.dtype.type(1), part.dtype.type(_EPSILON)
    return np.asarray(np.square(one / (part * (highest - lowest) + lowest) - epsilon))  # lo = hi: any part is lo


def is_quantised(held: Mapping[str, StoredArray]) -> bool:
    return any(kind not in held or held[kind].dtype in ("I8", "U8") for kind in (FIRST, SECOND)) and SECOND in held


def decoded(name: str, held: Mapping[str, StoredArray], shape: Shape | None) -> dict[str, ForeignTensor]:
    """Both moments of a parameter, by type, from its stored arrays; `shape` is the parameter's, if known.

    Raises `StateMismatch` if they are not as Paddle's quantiser writes them.
    """
    second = held[SECOND]
    if shape is not None and second.shape != shape:
        raise second.odd(f"the parameter has shape {list(shape)}")
    packed = FIRST not in held
    for kind, dtype in ((FIRST, "I8"), (SECOND, "I8" if packed else "U8")):
        if kind in held and (held[kind].dtype != dtype or held[kind].shape != second.shape):
            raise held[kind].odd(f"its codes must be {dtype} of shape {list(second.shape)}")
    wanted = _shape_of_scales(second, packed)
    for kind in (SCALES, LOWEST, HIGHEST):
        if kind not in held:
            raise second.odd(f"{name}/{kind} is missing")
        if held[kind].dtype != "F32" or held[kind].shape != wanted:
            raise held[kind].odd(f"its scales must be F32 of shape {list(wanted)}")
    stored = {kind: array.tensor("optim", array.key) for kind, array in held.items()}
    codes, form = stored[SECOND if packed else FIRST], HalfBytes if packed else Bytes
    parts = {FIRST: (codes, (stored[SCALES],)), SECOND: (stored[SECOND], (stored[LOWEST], stored[HIGHEST]))}
    return {
        kind: ForeignTensor(TensorSpec("optim", f"{name}/{kind}", "F32", second.shape), (), decoder=form(*part))
        for kind, part in parts.items()
    }


def _shape_of_scales(codes: StoredArray, packed: bool) -> Shape:
    if not packed:
        return codes.shape[1:2]
    if len(codes.shape) != 2 or codes.shape[0] % GROUP_ROWS:
        raise codes.odd(f"4-bit codes need a matrix whose row count is a multiple of {GROUP_ROWS}")
    return (codes.shape[0] // GROUP_ROWS, codes.shape[1])
