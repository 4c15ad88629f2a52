"""Parts of other tensors: boxes, cuts, fused tensors and stacks, all held against numpy on small tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout import parts
from holdfast_formats.layout.parts import Fused, LocalTensor, Part
from holdfast_formats.region import Box, Shape, whole
from tests.local_tensors import fill, padded

Arrays = dict[str, NDArray[Any]]
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def numbered(shape: Shape, first: int = 1) -> NDArray[Any]:
    """A tensor in which no two elements are equal, and none is zero."""
    return np.arange(first, first + prod(shape)).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    """A box inside a tensor of this shape, of at least one element."""
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def fused(draw: st.DrawFn) -> tuple[LocalTensor, Arrays, NDArray[Any]]:
    """A fused tensor, the tensors it is made of, and what numpy makes of them."""
    shape = draw(SHAPES)
    dimension, groups = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    tensors: Arrays = {}
    for i in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 2)) * groups
        tensors[f"t{i}"] = numbered((*shape[:dimension], length, *shape[dimension + 1 :]), 1000 * i + 1)
    made = parts.fuse("fused", "I64", [(name, whole(t.shape)) for name, t in tensors.items()], dimension, groups)
    split = [np.split(t, groups, axis=dimension) for t in tensors.values()]
    return made, tensors, np.concatenate([s[group] for group in range(groups) for s in split], axis=dimension)


@given(st.data(), SHAPES)
def test_a_box_and_any_flat_range_of_it_hold_what_slicing_gives(data: st.DataObject, shape: Shape) -> None:
    """The local tensor of a box, and every run of its elements, equal numpy's; nothing is padding."""
    tensor = numbered(shape)
    box = data.draw(boxes(shape))
    local = parts.of_box("x", "I64", "t", box)
    expected = tensor[box.slices]
    assert np.array_equal(fill(local, {"t": tensor}), expected)
    assert local.padding == 0
    start = data.draw(st.integers(0, local.volume))
    stop = data.draw(st.integers(start, local.volume))
    cut = parts.flat(local, start, stop)
    assert cut.shape == (stop - start,) and cut.padding == 0
    assert np.array_equal(fill(cut, {"t": tensor}), expected.reshape(-1)[start:stop])


@given(st.data(), fused())
def test_fused_tensors_interleave_their_parts_group_by_group(
    data: st.DataObject, made: tuple[LocalTensor, Arrays, NDArray[Any]]
) -> None:
    """A fused tensor, and any flat range of it, is the concatenation of its parts' groups."""
    local, tensors, expected = made
    assert local.shape == expected.shape
    assert np.array_equal(fill(local, tensors), expected)
    start = data.draw(st.integers(0, local.volume))
    stop = data.draw(st.integers(start, local.volume))
    assert np.array_equal(fill(parts.flat(local, start, stop), tensors), expected.reshape(-1)[start:stop])


@given(st.data(), fused())
def test_parts_of_a_fused_tensor_are_found_in_it(
    data: st.DataObject, made: tuple[LocalTensor, Arrays, NDArray[Any]]
) -> None:
    """A box of an element is read out of the fused tensor, or out of a stack of such, that holds it."""
    local, tensors, _ = made
    other = local._replace(parts=tuple(part._replace(tensor="other-" + part.tensor) for part in local.parts))
    stacked = parts.stack("stack", [local, other])
    everything = {**tensors, **{"other-" + name: tensor + 500 for name, tensor in tensors.items()}}
    held = {name: tensor for name, tensor in everything.items() if tensor.size}
    if not held:
        return
    name = data.draw(st.sampled_from(sorted(held)))
    box = data.draw(boxes(held[name].shape))
    wanted = parts.of_box("x", "I64", name, box)
    sources = {each: [Fused("stack", stacked.shape, stacked.parts)] for each in held}
    found = parts.resolve(wanted, sources)
    assert {part.tensor for part in found.parts} == {"stack"}
    assert np.array_equal(fill(found, {"stack": fill(stacked, everything)}), held[name][box.slices])


def test_padding_is_zero_and_counted() -> None:
    """Rows behind the last part are zeros, also in a cut of them."""
    local = padded(parts.full("t", "I64", (3, 2)), 5)
    assert local.padding == 4
    assert fill(local, {"t": numbered((3, 2))}).tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]
    tail = parts.rows(local, 2, 5)
    assert tail.shape == (3, 2) and tail.padding == 4
    assert fill(tail, {"t": numbered((3, 2))}).tolist() == [[5, 6], [0, 0], [0, 0]]
    assert parts.flat(local, 6, 10).parts == ()
    assert fill(parts.flat(local, 6, 10), {"t": numbered((3, 2))}).tolist() == [0, 0, 0, 0]


def test_an_empty_box_has_no_part() -> None:
    """A shard without elements is a tensor without parts, and nothing is missing from it."""
    empty = parts.of_box("x", "I64", "t", Box((0, 0), (0, 3)))
    assert empty.parts == () and empty.padding == 0
    assert parts.full("s", "I64", ()).parts == (Part("s", Box((), ()), 0, ()),)


def test_what_cannot_be_fused_stacked_or_found_is_refused_by_name() -> None:
    """Groups that do not divide, parts cut otherwise, unequal stacks and elements that are not stored are named."""
    with pytest.raises(StateMismatch, match="5 of 'q'"):
        parts.fuse("qkv", "I64", [("q", whole((5, 2)))], 0, 2)
    with pytest.raises(StateMismatch, match=r"\[2, 4\] of 'up' and \[4, 2\] of 'gate' cannot be concatenated along"):
        parts.fuse("gate_up", "I64", [("gate", whole((4, 2))), ("up", whole((2, 4)))], 0, 1)
    with pytest.raises(StateMismatch, match="'experts' cannot be stacked"):
        parts.stack("experts", [parts.full("a", "I64", (2,)), parts.full("b", "I64", (3,))])
    held = Fused("stack", (2, 2), parts.full("a", "I64", (2, 2)).parts)
    with pytest.raises(StateMismatch, match="'stack' do not hold everything"):
        parts.resolve(parts.full("a", "I64", (3, 2)), {"a": [held]})
    crooked = Fused("odd", (4, 4), (Part("a", Box((0, 0), (2, 2)), 0, (3, 1)),))
    with pytest.raises(StateMismatch, match="not a box of"):
        parts.resolve(parts.full("a", "I64", (2, 2)), {"a": [crooked]})
