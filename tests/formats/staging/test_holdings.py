"""holdings: a tensor's bytes out of the boxes that slots hold, whatever the cuts and whatever range is asked for."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.region import Box
from holdfast_formats.staging import holdings
from holdfast_formats.staging.holdings import Holding
from holdfast_formats.tensors import TensorSpec

DTYPES = {"U8": np.dtype("u1"), "F16": np.dtype("<f2"), "I32": np.dtype("<i4"), "F64": np.dtype("<f8")}


@st.composite
def held_tensors(draw: st.DrawFn) -> tuple[TensorSpec, np.ndarray, list[Holding]]:
    """A tensor of up to three dimensions, and holdings that tile it: a grid of boxes, each in a slot with room around it."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    spec = TensorSpec("model", "w", dtype, shape)
    octets = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, spec.nbytes, dtype=np.uint8)
    full = octets.view(DTYPES[dtype]).reshape(shape)
    cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
    grid: list[list[tuple[int, int]]] = [[]]
    for edges in cuts:
        grid = [[*box, pair] for box in grid for pair in itertools.pairwise(edges)]
    held = []
    for box in grid:
        place = Box(tuple(low for low, _ in box), tuple(high - low for low, high in box))
        slot = np.frombuffer(full[place.slices].tobytes() + b"\x07\x07", np.uint8)
        held.append(holdings.hold(spec, place, slot))
    return spec, octets, held


@given(case=held_tensors(), data=st.data())
def test_any_range_is_gathered_and_seen_as_it_is(
    case: tuple[TensorSpec, np.ndarray, list[Holding]], data: st.DataObject
) -> None:
    """Whole elements or not, the range has the tensor's bytes; a view, where there is one, shows the same."""
    spec, octets, held = case
    start = data.draw(st.integers(0, spec.nbytes))
    stop = data.draw(st.integers(start, spec.nbytes))
    target = np.full(stop - start, 99, np.uint8)
    if start < stop:
        assert holdings.gather(spec, held, start, target) == stop - start
        assert np.array_equal(target, octets[start:stop])
        seen = holdings.view(held, start, stop)
        assert seen is None or np.array_equal(seen, octets[start:stop])
    if len(held) == 1:
        assert holdings.view(held, 0, spec.nbytes) is not None


@given(case=held_tensors())
def test_what_nobody_holds_is_told(case: tuple[TensorSpec, np.ndarray, list[Holding]]) -> None:
    """With a box missing, fewer bytes are gathered than were asked for."""
    spec, _, held = case
    assert holdings.gather(spec, held[1:], 0, np.empty(spec.nbytes, np.uint8)) < spec.nbytes


def test_a_whole_tensor_is_held_without_ado() -> None:
    """`hold_all` shows what `hold` of the whole box shows, and nothing behind it."""
    spec = TensorSpec("model", "w", "I32", (2, 3))
    slot = np.arange(40, dtype=np.uint8)
    whole = holdings.hold(spec, Box((0, 0), (2, 3)), slot)
    assert np.array_equal(holdings.hold_all(spec, slot).flat, whole.flat) and len(whole.flat) == spec.nbytes
    assert holdings.hold_all(spec, slot).span == whole.span == (0, spec.nbytes)
