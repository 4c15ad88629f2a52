"""Live memory that overlaps is found, and what is stored for it compared."""

from __future__ import annotations

import pytest
import torch

from holdfast.tensors.casting import Cast, apart
from holdfast.tensors.leaves import Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.matching import Overlap, overlaps
from holdfast_formats.region import whole


def leaf(name: str, tensor: torch.Tensor) -> Leaf:
    shape = tuple(tensor.shape)
    return Leaf("g", name, "F32", shape, (LivePiece(whole(shape), tensor),), "replicate")


def found(*tensors: torch.Tensor) -> list[Overlap]:
    return overlaps(Cast(one, one) for one in (leaf(str(number), tensor) for number, tensor in enumerate(tensors)))


def stored(pair: Overlap, first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these two agree."""
    for one, tensor in ((pair.first, first), (pair.other, other)):
        one.pieces[0].tensor.copy_(tensor)
    return pair.is_equal()


LINE = torch.arange(12.0)
PAIRS = {
    "the same": (LINE[:4], LINE[:4]),
    "rows that meet": (LINE[:6], LINE[4:]),
    "another shape": (LINE, LINE.view(3, 4)),
    "transposed": (LINE.view(3, 4), LINE.view(3, 4).t()),
    "a column": (LINE.view(3, 4)[:, 1], LINE[1:3]),
}
APART = {
    "rows": (LINE[:6], LINE[6:]),
    "columns": (LINE.view(3, 4)[:, :2], LINE.view(3, 4)[:, 2:]),
    "interleaved": (LINE[::2], LINE[1::2]),
    "empty": (LINE[:0], LINE),
    "of another memory": (LINE, LINE.clone()),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_what_overlaps_is_compared_where_it_does(kind: str) -> None:
    """What was in one memory agrees. Another value in an element of both does not, one beside it does."""
    first, other = PAIRS[kind]
    (pair,) = found(first, other)
    assert pair.text == "g/1 overlaps g/0 here"
    assert stored(pair, first, other) and not stored(pair, first, other + 1) and not stored(pair, first + 1, other)
    assert LINE.tolist() == list(range(12))


def test_elements_that_are_not_shared_may_be_anything() -> None:
    """Rows of which one is in both."""
    (pair,) = found(LINE[:6], LINE[5:])
    first, other = torch.tensor([9.0, 9, 9, 9, 9, 5]), torch.tensor([5.0, 1, 1, 1, 1, 1, 1])
    assert stored(pair, first, other)
    other[0] = float("nan")
    assert not stored(pair, first, other)


@pytest.mark.parametrize("kind", APART)
def test_parts_of_one_memory_do_not_overlap(kind: str) -> None:
    """Nor do tensors of different memory."""
    assert not found(*APART[kind])


def test_one_memory_of_two_types_never_agrees() -> None:
    """Nor is anything compared there."""
    (pair,) = overlaps([Cast(leaf("a", LINE), leaf("a", LINE)), Cast(*[leaf("b", LINE.view(torch.int32))] * 2)])
    assert not pair.is_equal()


def test_what_is_rounded_is_compared_as_it_will_be() -> None:
    """Of a checkpoint in another dtype."""
    live = [leaf("0", LINE[:6]), leaf("1", LINE[5:])]
    (pair,) = overlaps([apart(one, "F64") for one in live])
    assert pair.first.dtype == "F64" and pair.first.pieces[0].tensor.dtype == torch.float64
    nearly = LINE[5:].double() + 1e-12
    assert stored(pair, LINE[:6].double(), nearly)
    assert not stored(pair, LINE[:6].double(), nearly + 1)
