"""Local tensors in memory: what `parts` mean, for tests to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.layout.parts import LocalTensor, view


def padded(local: LocalTensor, rows: int) -> LocalTensor:
    """The same tensor with padding behind it, so that dimension 0 has `rows`."""
    return local._replace(shape=(rows, *local.shape[1:]))


def fill(local: LocalTensor, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The local tensor, out of whole tensors in memory: what `parts` mean. Padding is zero."""
    memory = np.zeros(
        local.volume, next(iter(tensors.values())).dtype if not local.parts else tensors[local.parts[0].tensor].dtype
    )
    for part in local.parts:
        view(memory, part)[...] = tensors[part.tensor][part.box.slices]
    return memory.reshape(local.shape)
