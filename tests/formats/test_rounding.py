"""What may be rounded from what, and NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes, rounding
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, whole
from holdfast_formats.staging import holdings
from holdfast_formats.tensors import TensorSpec

WEIGHT = TensorSpec("model", "w", "BF16", (3, 4))
MASTER = TensorSpec("master", "w", "F32", (3, 4))


@pytest.mark.parametrize("weight", ["BF16", "F16", "F32", "F8_E4M3", "U16"])
@pytest.mark.parametrize("master", ["F32", "F64", "BF16", "I32"])
@pytest.mark.parametrize("shape", [(3, 4), (12,), (4, 3)])
def test_only_floats_of_sixteen_bits_from_f32_of_their_shape(weight: str, master: str, shape: tuple[int, ...]) -> None:
    of, made = TensorSpec("model", "w", weight, (3, 4)), TensorSpec("master", "w", master, shape)
    fits = weight in ("BF16", "F16") and master == "F32" and shape == (3, 4)
    assert rounding.possible(of, made) == fits
    if fits:
        rounding.check(of, "master", made, copied=False)
    else:
        with pytest.raises(StateMismatch, match=r"model/w, .* is to be rounded from master/w, which is"):
            rounding.check(of, "master", made, copied=False)


def test_no_master_and_a_weight_that_is_there_too_are_refused() -> None:
    with pytest.raises(StateMismatch, match="which is not saved") as caught:
        rounding.check(WEIGHT, "master", None, copied=False)
    assert "leave out model='from-master'" in caught.value.hint
    with pytest.raises(StateMismatch, match="on one rank, and copied on another"):
        rounding.check(WEIGHT, "master", MASTER, copied=True)


@given(st.sampled_from(["BF16", "F16"]), st.integers(0, 11), st.booleans(), st.integers(0, 2**32 - 1), st.integers(0, 1))
def test_nan_is_found_and_nothing_else(dtype: str, element: int, strided: bool, bits: int, odd: int) -> None:
    """Any bits of one master, in one piece or in two; infinities and what becomes infinite pass."""
    spec = TensorSpec("model", "w", dtype, (3, 4))
    values = np.ones((3, 4), "<f4")
    values.reshape(-1).view("<u4")[element] = bits
    boxes = [Box((0, 0), (3, 1)), Box((0, 1), (3, 3))] if strided else [whole((3, 4))]
    held = [
        holdings.hold(spec, box, np.frombuffer(values[box.slices].tobytes(), np.uint8), rounding.HELD_AS) for box in boxes
    ]
    target = np.empty(24 - odd, np.uint8)
    assert holdings.gather(spec, held, odd, target) == target.nbytes
    assert holdings.view(held, 0, 24) is None
    is_nan = bits & 0x7FFFFFFF > 0x7F800000
    seen = target[odd:] if odd else target
    if is_nan and not (odd and element == 0):
        with pytest.raises(StateMismatch, match="the master of 'w' has NaN"):
            rounding.check_rounded(spec, seen)
    else:
        rounding.check_rounded(spec, seen)
    if not is_nan:
        with np.errstate(all="ignore"):
            expected = values.astype(dtypes.to_numpy(dtype)).tobytes()
        assert target.tobytes() == expected[odd:]


def test_bf16_is_rounded_to_nearest_even_from_all_bits_of_a_stretch() -> None:
    """Against the definition, for a million floats around every exponent."""
    bits = np.concatenate([np.arange(2**13, dtype=np.uint32) + (high << 16) for high in range(0, 2**16, 480)]).astype("<u4")
    bits = bits[bits & 0x7FFFFFFF <= 0x7F800000]
    spec = TensorSpec("model", "w", "BF16", (len(bits),))
    target = np.empty(2 * len(bits), np.uint8)
    holdings.gather(spec, [holdings.hold(spec, whole(spec.shape), bits.view(np.uint8), "F32")], 0, target)
    wide = bits.astype(np.uint64)
    assert np.array_equal(target.view("<u2"), ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2"))
