"""Padding is exactly what no part covers, whatever the parts look like."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.layout import parts
from holdfast_formats.layout.padding import gaps
from holdfast_formats.layout.parts import LocalTensor
from holdfast_formats.region import Box
from tests.local_tensors import padded


@st.composite
def locals_(draw: st.DrawFn) -> LocalTensor:
    """A box or a fused tensor, with rows of padding, of which a flat range may have been cut."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    box = Box((0,) * len(shape), shape)
    dimension, groups = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, shape[0]]))
    if shape[dimension] % groups:
        groups = 1
    local = parts.fuse("f", "F32", [("a", box), ("b", box)], dimension, groups)
    dropped = draw(st.sampled_from([None, 0, 1]))
    if dropped is not None:  # a hole in the middle, and not behind
        local = local._replace(parts=tuple(part for part in local.parts if part.tensor != "ab"[dropped]))
    local = padded(local, local.shape[0] + draw(st.integers(0, 3)))
    if draw(st.booleans()):
        start = draw(st.integers(0, local.volume))
        local = parts.flat(local, start, draw(st.integers(start, local.volume)))
    return local


@given(locals_())
def test_gaps_are_what_nothing_covers(local: LocalTensor) -> None:
    """The ranges are ascending, do not touch, and hold every element that is in no part."""
    covered = np.zeros(local.volume, np.bool_)
    for part in local.parts:
        parts.view(covered, part)[...] = True
    found = gaps(local)
    assert all(start < stop for start, stop in found)
    assert all(a[1] < b[0] for a, b in pairwise(found))
    empty = np.ones(local.volume, np.bool_)
    for start, stop in found:
        empty[start:stop] = False
    assert np.array_equal(covered, empty)


def test_a_tensor_of_padding_alone() -> None:
    """No part: all of it is one range; nothing at all: none."""
    assert gaps(LocalTensor("p", "F32", (3, 2), ())) == [(0, 6)]
    assert gaps(LocalTensor("p", "F32", (0, 2), ())) == []
