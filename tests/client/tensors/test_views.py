"""Which strided views share memory, against the addresses of all of their elements."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tensors.fragments import any_share_memory, extent, start_in


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of one memory of 64 elements, of any strides (0 too) and of two widths, some of them empty."""
    memory = torch.arange(64, dtype=torch.int16)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        of = memory if draw(st.booleans()) else memory.view(torch.uint8)
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        room, strides = of.numel() - 1, []
        for n in shape:
            strides.append(draw(st.integers(0, min(9, room // max(n - 1, 1)))))
            room -= max(n - 1, 0) * strides[-1]
        found.append(of.as_strided(shape, strides, draw(st.integers(0, room))))
    return found


def places(tensor: torch.Tensor) -> set[int]:
    """The address of every byte of a tensor."""
    first = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(n) * stride * tensor.element_size()
        first += steps.reshape([-1 if d == dimension else 1 for d in range(tensor.dim())])
    return {tensor.data_ptr() + at + byte for at in first.flatten().tolist() for byte in range(tensor.element_size())}


@given(views())
def test_shared_memory_is_found_byte_by_byte(tensors: list[torch.Tensor]) -> None:
    """Two of the views share memory if, and only if, a byte is in both; views inside of themselves do not count."""
    held = [places(tensor) for tensor in tensors]
    shared = any(one & two for n, one in enumerate(held) for two in held[:n])
    assert any_share_memory(tensors) == shared


@given(views())
def test_the_extent_ends_at_the_last_element(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        size = tensor.element_size()
        assert extent(tensor) == (max(places(tensor)) + 1 - tensor.data_ptr()) // size if tensor.numel() else True
        assert (extent(tensor) == 0) == (tensor.numel() == 0)


def test_tensors_of_other_memory_share_none():
    """Different memory, and tensors without any, have nothing in common."""
    assert not any_share_memory([torch.zeros(8), torch.zeros(8), torch.zeros(8, device="meta"), torch.empty(0)])
    assert not any_share_memory([torch.zeros(8, device="meta")] * 2)


def test_the_place_of_a_view_in_memory():
    """Counted in elements from the other's first one, even if that is not the first of its memory."""
    outer = torch.zeros(5, 6)[1:4]
    assert start_in(outer[1:, 2:], outer) == 8
    assert start_in(outer, outer) == start_in(torch.empty(0), outer) == 0
    assert start_in(outer[2:], outer[:2]) is None and start_in(outer, outer[1:]) is None
    assert start_in(torch.zeros(2), outer) is None and start_in(outer.view(torch.int16), outer) is None
