"""Tensors that are not merged, such as masks of positions and counters: they must be equal in all models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor, TensorKey
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec


class Identical(NamedTuple):
    """The same values in every model; compared bit by bit while they are copied."""

    sources: tuple[ForeignTensor, ...]
    names: tuple[str, ...]

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return self.sources

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """`StateMismatch` with tensor and model if one has other values."""
        values = fetch(self.sources[0], box)
        for name, other in zip(self.names[1:], self.sources[1:], strict=True):
            if not np.array_equal(values.view(np.uint8), fetch(other, box).view(np.uint8)):
                spec = other.spec
                raise StateMismatch(
                    f"tensor {spec.name!r} of {spec.dtype} is not merged but copied, and differs between {self.names[0]} "
                    f"and {name}",
                    hint="make it equal in all models first",
                    tensor=spec.name,
                )
        return values


def identical(key: TensorKey, names: Sequence[str], sources: Sequence[ForeignTensor]) -> ForeignTensor:
    first = sources[0].spec
    spec = TensorSpec(key.group, key.name, first.dtype, first.shape)
    return ForeignTensor(spec, (), decoder=Identical(tuple(sources), tuple(names)))
