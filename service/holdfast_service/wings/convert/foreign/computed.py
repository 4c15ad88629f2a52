"""Tensors that no file has, but that follow from others or from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor, TensorKey
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec


class Rounded(NamedTuple):
    """The values of a tensor rounded to a narrower dtype, to the nearest, ties to even."""

    source: ForeignTensor
    dtype: str

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.source,)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            return fetch(self.source, box).astype(dtypes.to_numpy(self.dtype))


class Number(NamedTuple):
    """The same number everywhere, in F32."""

    value: float

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return ()

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        return np.full(box.shape, self.value, "<f4")


class Shifted(NamedTuple):
    """The values of a tensor plus a number, in F32."""

    source: ForeignTensor
    added: float

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self.source,)

    @property
    def terms(self) -> object:
        return self.added

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        return fetch(self.source, box).astype(np.float32) + np.float32(self.added)


def shifted(source: ForeignTensor, key: TensorKey, added: float) -> ForeignTensor:
    """A tensor's values plus a number as F32 under another key."""
    return ForeignTensor(TensorSpec(key.group, key.name, "F32", source.spec.shape), (), decoder=Shifted(source, added))


def rounded(source: ForeignTensor, key: TensorKey, dtype: str) -> ForeignTensor:
    """A tensor's values in `dtype` under another key."""
    return ForeignTensor(TensorSpec(key.group, key.name, dtype, source.spec.shape), (), decoder=Rounded(source, dtype))


def scalar(key: TensorKey, value: float) -> ForeignTensor:
    """A number as an F32 tensor without dimensions."""
    return ForeignTensor(TensorSpec(key.group, key.name, "F32", ()), (), decoder=Number(value))


class Numbers(NamedTuple):
    """Whole numbers in a row."""

    terms: tuple[int, ...]
    dtype: str

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return ()

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        first, count = box.offset[0], box.shape[0]
        return np.array(self.terms[first : first + count], dtypes.to_numpy(self.dtype))


def whole_numbers(key: TensorKey, values: Sequence[int], dtype: str) -> ForeignTensor:
    """Whole numbers as a tensor of one dimension; they must fit into `dtype`."""
    spec = TensorSpec(key.group, key.name, dtype, (len(values),))
    return ForeignTensor(spec, (), decoder=Numbers(tuple(values), dtype))
