"""Strided moves: numpy's copy, and changes of the source since it was noted, with the libraries and without."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory import native_copy
from holdfast.stage.strided_moves import StridedMoves

STRETCH = 512


def strided(shape: list[int], order: list[int], dtype: str, step: int) -> np.ndarray:
    """An array whose dimensions are in this order in memory, without its `step` last elements in the nearest one."""
    size = prod(shape) * np.dtype(dtype).itemsize
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    return values[..., : values.shape[-1] - step].transpose(order)


KINDS = st.tuples(
    st.lists(st.integers(2, 40), min_size=2, max_size=3), st.sampled_from(["u1", "<i2", "<i4", "<i8"]), st.integers(0, 1)
)


@given(st.lists(KINDS, min_size=1, max_size=5), st.data())
def test_what_is_noted_and_then_changed_is_named(kinds: list, data: st.DataObject) -> None:
    """As many elements as a stretch and the next one have, in a row, never change unseen; other sources are not named."""
    sources = [strided(shape, data.draw(st.permutations(range(len(shape)))), dtype, step) for shape, dtype, step in kinds]
    changed, seed = data.draw(st.integers(0, len(sources) - 1)), data.draw(st.integers(0, 2**60))
    count = 2 * STRETCH // sources[changed].itemsize
    first = data.draw(st.integers(0, max(sources[changed].size - count, 0)))
    for library in (native_copy._library, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_copy, "_library", library)
            targets = [np.zeros(source.shape, source.dtype) for source in sources]
            moves = StridedMoves(list(zip(targets, sources, strict=True)), STRETCH)
            moves.noted(moves.read(seed))
            assert not any(map(moves.copy, range(len(sources))))
            assert all(map(np.array_equal, targets, sources))
            moves.noted(moves.read(seed))
            order = np.argsort([-step for step in sources[changed].strides], kind="stable")
            inside = sources[changed].transpose(order)
            places = np.unravel_index(np.arange(first, min(first + count, inside.size)), inside.shape)
            inside[places] ^= 1
            assert list(map(moves.copy, range(len(sources)))) == [n == changed for n in range(len(sources))]
            assert np.array_equal(targets[changed], sources[changed])


@given(st.lists(KINDS, min_size=1, max_size=5), st.data())
def test_the_library_reads_the_elements_that_numpy_does(kinds: list, data: st.DataObject) -> None:
    sources = [strided(shape, data.draw(st.permutations(range(len(shape)))), dtype, step) for shape, dtype, step in kinds]
    seed, found = data.draw(st.integers(0, 2**60)), []
    for library in (native_copy._library, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_copy, "_library", library)
            found.append(StridedMoves([(np.zeros(one.shape, one.dtype), one) for one in sources], STRETCH).read(seed))
    assert np.array_equal(found[0].places, found[1].places)
    bits = 8 * found[0].places[:, 1]  # numpy extends the sign
    assert np.array_equal(*(one.values << (64 - bits) for one in found))
