"""tensors: what may be stored, and what a rank may hold of it."""

from __future__ import annotations

import pytest
from hypothesis import given

from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.region import Box, Shape, whole
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes

from .strategies import shape_and_grid, specs


@given(specs())
def test_ordinary_tensors_pass(tensors: list[TensorSpec]) -> None:
    """Any name, whole-byte dtype and shape is fine, empty and 0-d tensors too."""
    for spec in tensors:
        spec.check()
        assert spec.nbytes == box_bytes(spec, whole(spec.shape))


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (TensorSpec("model", "", "F32", ()), LimitExceeded),
        (TensorSpec("model", "ä" * 513, "F32", ()), LimitExceeded),
        (TensorSpec("model", "__metadata__", "F32", ()), InvalidRequest),
        (TensorSpec("model", "\ud800", "F32", ()), InvalidRequest),
        (TensorSpec("model", "w", "F32", (-1, -1)), InvalidRequest),
        (TensorSpec("model", "w", "F32", (1,) * 65), InvalidRequest),
        (TensorSpec("model", "w", "F31", (1,)), InvalidRequest),
        (TensorSpec("model", "w", "F4", (1,)), StateMismatch),
    ],
)
def test_what_no_file_could_hold_is_refused(spec: TensorSpec, error: type[CheckpointError]) -> None:
    """Names, shapes and dtypes that cannot stand in a file are refused before anything is written."""
    with pytest.raises(error):
        spec.check()


def test_limits_are_inclusive() -> None:
    """A name of 1024 bytes and a shape of 64 dimensions pass."""
    TensorSpec("model", "ä" * 512, "F32", (1,) * 64).check()


@given(shape_and_grid())
def test_fragments_of_a_grid_hold_all_bytes(case: tuple[Shape, list[Box]]) -> None:
    """The boxes of a tiling, as one fragment, pass the check and have as many bytes as the tensor."""
    shape, grid = case
    fragment = StagedFragment(TensorSpec("model", "w", "BF16", shape), tuple(grid), 0)
    fragment.check()
    assert fragment.nbytes == fragment.spec.nbytes


@pytest.mark.parametrize(
    ("dtype", "box"),
    [("F32", Box((0, 1), (1, 4))), ("F32", Box((0,), (1,))), ("F4", Box((0, 1), (1, 2))), ("F4", Box((0, 0), (1, 3)))],
)
def test_boxes_that_do_not_fit_are_refused_by_name(dtype: str, box: Box) -> None:
    """A box outside the tensor, of another rank, or cut inside a byte is refused, and the tensor named."""
    spec = TensorSpec("model", "w", dtype, (2, 4))
    StagedFragment(spec, (Box((0, 2), (2, 2)),), 0).check()
    with pytest.raises(StateMismatch, match="'w'"):
        StagedFragment(spec, (box,), 0).check()
