"""Parts of tensor-parallel ranks are joined as Paddle cuts them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.reading import fetched
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import joined, of_arrays, proportions, whole_shape
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray
from tests.kit.files import FilesInMemory


@pytest.mark.parametrize(
    ("dimension", "parts"), [(0, (1,)), (1, (1,)), (1, (1, 1)), (1, (1, 1, 1)), (1, (2, 1, 1)), (0, (1, 1))]
)
def test_cuts(dimension: int, parts: tuple[int, ...]) -> None:
    """Columns, rows, and everything that is fused in columns by itself; rows are never fused. A copy is placed alike."""
    whole = np.arange(12 * 36, dtype="<f4").reshape(12, 36)
    fused = parts if dimension == 1 else (1,)
    bounds = [36 // sum(fused) * end for end in accumulate(fused)][:-1] if dimension else []
    pieces = np.split(whole, bounds, 1) if dimension else [whole]
    locals_ = [np.concatenate([np.split(piece, 3, dimension)[rank] for piece in pieces], dimension) for rank in range(3)]
    files = FilesInMemory({f"r{rank}{copy}": part.tobytes() for rank, part in enumerate(locals_) for copy in "ab"})
    held = {
        rank: of_arrays([StoredArray(f"r{rank}{c}", "w", "F32", p.shape, 0, strides(p.shape)) for c in "ab"])
        for rank, p in enumerate(locals_)
    }
    found = joined(held, 3, whole.shape, parts).tensor("model", "w")
    np.testing.assert_array_equal(fetched(files, found), whole)
    np.testing.assert_array_equal(fetched(files, found._replace(pieces=found.copies)), whole)


def _held(*shapes: tuple[int, ...]) -> dict[int, StoredArray]:
    return {rank: StoredArray(f"r{rank}", "w", "F32", shape, 0, strides(shape)) for rank, shape in enumerate(shapes)}


def test_whole_on_every_rank() -> None:
    """Then the ranks' arrays are copies of each other."""
    found = joined({rank: of_arrays([one]) for rank, one in _held((4,), (4,)).items()}, 2, (4,))
    assert [piece.file for piece in (*found.pieces, *found.copies)] == ["r0", "r1"]


def test_what_is_no_cut() -> None:
    """A rank that is missing, other shapes, two dimensions at once, fused layers that do not divide."""
    for shapes, degree, whole, parts, message in (
        (((2, 4),), 2, (4, 4), (1,), "rank 1 has no part of it"),
        (((2, 4), (1, 4)), 2, (4, 4), (1,), r"r1: 'w' is F32 of shape \[1, 4\]: another rank has F32 of shape \[2, 4\]"),
        (((2, 2), (2, 2)), 2, (4, 4), (1,), r"not one of 2 parts of \[4, 4\]"),
        (((3, 4), (3, 4)), 2, (4, 4), (1,), r"not one of 2 parts of \[4, 4\]"),
        (((4, 3), (4, 3)), 2, (4, 6), (1, 1), "3 columns cannot be split into 1 : 1"),
    ):
        with pytest.raises(StateMismatch, match=message):
            joined({rank: of_arrays([one]) for rank, one in _held(*shapes).items()}, degree, whole, parts)


def test_layers() -> None:
    """Gate and up by name, q, k and v by the heads of Phi-3; which dimension is cut, where only the name tells."""
    phi = {"model_type": "phi3", "num_attention_heads": 8, "num_key_value_heads": 2}
    assert proportions("model.layers.0.self_attn.qkv_proj.weight", phi) == (4, 1, 1)
    assert proportions("model.layers.0.self_attn.qkv_proj.weight", {"model_type": "llama"}) == (1,)
    assert proportions("model.layers.0.mlp.gate_up_fused_proj.weight", None) == (1, 1)
    assert proportions("model.layers.0.mlp.experts.gate_up_proj.weight", {"model_type": "gpt_oss"}) == (1,)
    assert whole_shape("model.layers.0.mlp.up_proj.weight", (6, 5), 2) == (6, 10)
    assert whole_shape("model.layers.0.self_attn.q_proj.bias", (5,), 2) == (10,)
    assert whole_shape("model.layers.0.self_attn.o_proj.weight", (6, 5), 2) == (12, 5)
    assert whole_shape("model.layers.0.self_attn.o_proj.bias", (5,), 2) is None
    assert whole_shape("model.norm.weight", (5,), 2) is None
