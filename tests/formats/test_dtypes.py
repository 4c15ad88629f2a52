"""dtypes: names, widths, numpy counterparts."""

from __future__ import annotations

import pytest

from holdfast_formats import dtypes
from holdfast_formats.errors import InvalidRequest, StateMismatch

WHOLE = [name for name, width in dtypes.BITS.items() if width % 8 == 0]
SUB_BYTE = [name for name in dtypes.BITS if name not in WHOLE]


@pytest.mark.parametrize("name", WHOLE)
def test_numpy_counterpart_has_the_same_width_and_name(name: str) -> None:
    """Every whole-byte type has a numpy dtype of its width, and no other type has it."""
    assert dtypes.to_numpy(name).itemsize * 8 == dtypes.bits(name)
    assert [other for other in WHOLE if dtypes.to_numpy(other) == dtypes.to_numpy(name)] == [name]


@pytest.mark.parametrize("name", SUB_BYTE)
def test_sub_byte_types_have_no_numpy_dtype(name: str) -> None:
    """numpy cannot address four or six bits; the refusal says what to do instead."""
    with pytest.raises(InvalidRequest, match="read it as bytes"):
        dtypes.to_numpy(name)


def test_order_is_the_order_of_declaration() -> None:
    """The storage order counts the table's rows from BOOL, the lowest, to U64, the highest."""
    assert sorted(dtypes.ORDER, key=dtypes.ORDER.__getitem__) == list(dtypes.BITS)
    assert dtypes.ORDER["BOOL"] == 0
    assert dtypes.ORDER["U64"] == len(dtypes.BITS) - 1


def test_unknown_names_are_refused() -> None:
    """A name that safetensors does not have is refused wherever it comes in."""
    with pytest.raises(InvalidRequest, match="F31"):
        dtypes.bits("F31")
    with pytest.raises(InvalidRequest, match="F31"):
        dtypes.to_numpy("F31")


def test_nbytes_counts_whole_bytes() -> None:
    """Bytes follow from bits; elements that end inside a byte are refused by the tensor's name."""
    assert dtypes.nbytes("F32", 3) == 12
    assert dtypes.nbytes("F4", 4) == 2
    assert dtypes.nbytes("F6_E2M3", 0) == 0
    with pytest.raises(StateMismatch, match="'w'"):
        dtypes.nbytes("F6_E2M3", 2, "w")
