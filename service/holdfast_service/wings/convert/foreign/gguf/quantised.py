"""Decodes the quantised tensors of GGUF files by the package `gguf` of llama.cpp, a band of rows at a time."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box

PACKAGE = "gguf"


class QuantisedBlock(NamedTuple):
    """A quantised type: its name, and how many values how many bytes stand for."""

    name: str
    values: int
    bytes: int


@cache
def library() -> Any:
    """The package; None if it is not installed."""
    try:
        return import_module(PACKAGE)
    except ImportError:
        return None


def block(kind: int, path: str, tensor: str) -> QuantisedBlock:
    """The quantised type with ggml's number. `StateMismatch` without the package, and for types that it does not decode."""
    package = library()
    if package is None:
        raise StateMismatch(
            f"{path}: tensor {tensor!r} is quantised, and the package {PACKAGE}, which decodes it, is not installed",
            hint=f"pip install {PACKAGE}, where the service runs",
            file=path,
            tensor=tensor,
        )
    try:
        known = package.GGMLQuantizationType(kind)
        values, size = package.GGML_QUANT_SIZES[known]
        package.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise StateMismatch(
            f"{path}: tensor {tensor!r} has ggml's type {kind}, which the package {PACKAGE} does not decode",
            hint="export the model from its unquantised weights: import those",
            file=path,
            tensor=tensor,
        ) from error
    return QuantisedBlock(known.name, values, size)


class Dequantised(NamedTuple):
    """The values of a quantised tensor in F32. `codes` are its bytes: those of a row in the last dimension."""

    codes: ForeignTensor
    kind: int
    block: QuantisedBlock

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.codes,)

    @property
    def terms(self) -> tuple[int, QuantisedBlock]:
        return self.kind, self.block

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        (*offset, first), (*shape, count) = box
        start, stop = first // self.block.values, -(-(first + count) // self.block.values)
        stored = Box((*offset, start * self.block.bytes), (*shape, (stop - start) * self.block.bytes))
        rows = fetch(self.codes, stored).reshape(-1, stored.shape[-1])
        package = library()
        values = package.dequantize(np.ascontiguousarray(rows), package.GGMLQuantizationType(self.kind))
        skipped = first - start * self.block.values
        return np.asarray(values[:, skipped : skipped + count], np.float32).reshape(box.shape)
