"""A merged tensor takes no more memory when it is larger, whatever has to be found out about the whole of it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats.errors import LimitExceeded
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.region import Box, flat_boxes, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge import merged_tensor, norms, range_pipeline, task_vectors
from holdfast_service.wings.merge.merged_tensor import MergedTensor
from holdfast_service.wings.merge.recipe import read_recipe
from holdfast_service.wings.merge.scanning import Workspaces

RECIPE = (
    "{merge_method: METHOD, base_model: a@1, models: [{model: b@1}], parameters: {weight: 1, density: 0.5, rescale: l1}}"
)
COLUMNS = 256


def made_up(stored: ForeignTensor, box: Box, into: NDArray[Any] | None = None) -> NDArray[Any]:
    """Values that follow from their place: nobody holds the whole tensor."""
    rows = np.arange(box.offset[0], box.stop[0], dtype=np.float32)[:, None]
    columns = np.arange(box.offset[1], box.stop[1], dtype=np.float32)[None, :]
    made: NDArray[Any] = np.sin(rows * np.float32(len(stored.spec.name)) + columns, out=into)
    return made


def peak(method: str, rows: int) -> int:
    spec = TensorSpec("model", "w", "F32", (rows, COLUMNS))
    inputs = tuple(ForeignTensor(TensorSpec("model", name, "F32", spec.shape), ()) for name in ("b", "base"))
    tensor = MergedTensor(spec, inputs, read_recipe(RECIPE.replace("METHOD", method)).terms("w", 0))
    elements = rows * COLUMNS
    tracemalloc.start()
    try:
        for at in range(0, elements, 2**15):
            for box in flat_boxes(at, min(at + 2**15, elements), spec.shape):
                tensor.decode(box, made_up)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["ties", "breadcrumbs", "dare_ties", "della"])
def test_memory_is_bounded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_tensor, "BLOCK_ELEMENTS", 2**13)
    monkeypatch.setattr(range_pipeline, "READ_BYTES", 2**16)
    monkeypatch.setattr(task_vectors, "COLLECTED_MAX", 2**12)
    monkeypatch.setattr(norms, "_MASKS_BYTES_MAX", 2**13)
    small, large = peak(method, 512), peak(method, 8192)
    assert large < 1.1 * small + 2**21 < 4 * 8192 * COLUMNS  # threads may have their bins at the same time, or not


def test_tensors_of_a_job_share_their_memory() -> None:
    """Each had arrays of its own that stayed until the end of the job: a GiB for eighty tensors."""
    spec, spaces = TensorSpec("model", "w", "F32", (512, COLUMNS)), Workspaces()
    inputs = tuple(ForeignTensor(TensorSpec("model", name, "F32", spec.shape), ()) for name in ("b", "base"))
    terms = read_recipe(RECIPE.replace("METHOD", "ties")).terms("w", 0)
    tensors = [MergedTensor(spec, inputs, terms, spaces) for _ in range(12)]
    held = []
    tracemalloc.start()
    try:
        for tensor in tensors:
            tensor.decode(whole(spec.shape), made_up)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[3] < spec.nbytes  # threads may have had theirs at the same time only later


def test_long_rows_are_refused() -> None:
    """They would have to be sorted as a whole."""
    spec = TensorSpec("model", "w", "F32", (2, 2**25))
    with pytest.raises(LimitExceeded, match="row"):
        MergedTensor(spec, (), read_recipe(RECIPE.replace("METHOD", "della")).terms("w", 0))
