"""Codings of optimizer states and masters: every value that may come, any box, and what encoding costs."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast_formats.disk import codings
from holdfast_formats.disk.codings import BLOCK, PARTS
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, whole

SHAPES = st.sampled_from([(1,), (7,), (256,), (257,), (3, 300), (2, 3, 17), (1, 512)])
EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0, 1e-20]
FLOATS = st.one_of(st.sampled_from(EXTREME), st.floats(width=32, allow_nan=False, allow_infinity=False))
LOSSY = [coding for coding in PARTS if coding not in codings.LOSSLESS]


def decoded(coding: str, values: np.ndarray) -> np.ndarray:
    return codings.decode(coding, whole(values.shape), values.shape, codings.encode(coding, values))


@pytest.mark.parametrize("coding", LOSSY)
@given(data=st.data())
def test_encoding_what_was_decoded_changes_nothing(coding: str, data: st.DataObject) -> None:
    """Zeros, denormals, the greatest floats and blocks of one value; zeros stay zeros, and signs stay."""
    values = data.draw(arrays.arrays(np.float32, data.draw(SHAPES), elements=FLOATS))
    values = np.abs(values) if coding == "int8-log" else values
    with np.errstate(over="ignore"):
        once = decoded(coding, values)
    if not np.isfinite(once).all():
        assert coding == "bf16" and np.abs(values).max() > 3.38e38  # the compactor leaves such a tensor alone
        return
    assert np.array_equal(decoded(coding, once), once)
    assert not once[values == 0].any()
    assert (np.sign(once) * np.sign(values) >= 0).all()


@given(arrays.arrays(np.float32, SHAPES, elements=FLOATS))
def test_bounds_of_each_value(values: np.ndarray) -> None:
    """Of a signed code half a step of the square root, of the block's largest; of a logarithmic one half a step of bits."""
    for coding in ("int8", "int8-log"):
        given_values = np.abs(values) if coding == "int8-log" else values
        found = decoded(coding, given_values)
        rows, got = given_values.reshape(-1, values.shape[-1]), found.reshape(-1, values.shape[-1])
        for row, start in product(range(len(rows)), range(0, values.shape[-1], BLOCK)):
            block, made = rows[row, start : start + BLOCK].astype(np.float64), got[row, start : start + BLOCK]
            if coding == "int8":
                top = np.abs(block).max()
                steps = np.sqrt(np.abs(made.astype(np.float64)) / (top or 1)) - np.sqrt(np.abs(block) / (top or 1))
                assert np.abs(steps).max() <= 0.5 / 127 + 1e-3
                assert np.abs(made).max() == top
            elif block.any():
                bits, near = (array.astype(np.float32).view(np.uint32).astype(np.int64) for array in (block, made))
                span = bits.max() - bits[bits > 0].min()
                assert np.abs(bits - near).max() <= span / 508 + 1
                assert made.max() == block.max() and made[made > 0].min() == block[block > 0].min()


@given(data=st.data())
def test_any_box_of_a_tensor(data: st.DataObject) -> None:
    """Decoded from the boxes of the parts that are named for it; slabs tile the box, in order."""
    shape = data.draw(st.sampled_from([(600,), (5, 300), (2, 3, 520)]))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32) ** 2
    at = tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))
    for coding in LOSSY:
        parts = codings.encode(coding, values)
        boxes = {role: codings.part_box(part, box) for role, part in PARTS[coding].items()}
        cut = {
            role: parts[role][tuple(slice(o, s) for o, s in zip(b.offset, b.stop, strict=True))] for role, b in boxes.items()
        }
        assert np.array_equal(codings.decode(coding, box, shape, cut), decoded(coding, values)[at])
    flat = np.arange(values.size).reshape(shape)
    seen = []
    for slab in codings.slabs(box, data.draw(st.sampled_from([1, 100, 300, 1000, 10**6]))):
        seen += flat[tuple(slice(o, s) for o, s in zip(slab.offset, slab.stop, strict=True))].ravel().tolist()
    assert seen == flat[at].ravel().tolist()


@given(arrays.arrays(np.uint32, st.integers(1, 300)), st.booleans())
def test_masters_are_split_and_joined(bits: np.ndarray, half_way: bool) -> None:
    """Bit for bit: -0.0, infinities, carries into the exponent, and ties to even in both directions."""
    bits = bits & 0xFFFF0000 | 0x8000 if half_way else bits
    carried = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits, weight = bits[carried < 2**16], carried[carried < 2**16].astype(np.uint16)
    parted = codings.split(bits, weight)
    assert parted is not None
    assert np.array_equal(codings.join(parted[0], weight, parted[1]), bits)
    if len(weight):
        weight[0] ^= 1
        assert codings.split(bits, weight) is None


def test_rounding_is_the_frameworks() -> None:
    """All bit patterns around the middle of two weights, with every high half: ml_dtypes rounds as torch does."""
    high = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    bits = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    with np.errstate(all="ignore"):
        weight = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    sound = ~np.isnan(bits.view(np.float32))
    parted = codings.split(bits[sound], weight[sound])
    assert parted is not None and np.array_equal(codings.join(parted[0], weight[sound], parted[1]), bits[sound])
    broken = np.flatnonzero(~sound)
    lost = [codings.split(bits[i : i + 1], weight[i : i + 1]) for i in broken[:: len(broken) // 97]]
    assert None in lost  # NaN that rounding changes keep their tensor whole


def test_ties_of_a_box() -> None:
    """They are counted in the whole tensor."""
    shape = (4, 300)
    bits = np.full(shape, 0x3F818000, np.uint32)  # odd above the middle: rounded up
    weight = np.full(shape, 0x3F82, np.uint16)
    low, ties = codings.split(bits, weight) or (None, None)
    assert low is not None and ties is not None and ties.all()
    box = Box((1, 250), (2, 30))
    at = (slice(1, 3), slice(250, 280))
    parts = {"codes": low[at], "model": weight[at], "ties": np.flatnonzero(ties.ravel()).astype(np.uint64)}
    assert np.array_equal(codings.decode("low16", box, shape, parts).view(np.uint32), bits[at])
    outside = {**parts, "ties": np.array([3, 2**64 - 1], np.uint64)}
    with pytest.raises(StateMismatch, match="element 18446744073709551615 of a tensor of 1200"):
        codings.decode("low16", box, shape, outside)
