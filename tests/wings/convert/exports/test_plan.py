"""What people may write for a dtype and for weights."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.convert.exports import plan


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bf16", "BF16"), ("bfloat16", "BF16"), ("BF16", "BF16"), ("float", "F32"), ("fp16", "F16"), ("Float64", "F64")],
)
def test_names_of_dtypes(text: str, dtype: str) -> None:
    """As torch, numpy and safetensors spell them."""
    assert plan.dtype_named(text) == dtype


@pytest.mark.parametrize("text", ["int8", "I8", "fp8", "F8_E4M3", "", "bf"])
def test_weights_are_exported_as_floats(text: str) -> None:
    """A whole number, or a float that means nothing without its scale, is refused with what there is."""
    with pytest.raises(InvalidRequest) as caught:
        plan.dtype_named(text)
    assert "bfloat16" in caught.value.hint


def test_names_of_weights() -> None:
    """One of three; anything else is refused with these."""
    assert [plan.weights_named(name) for name in plan.WEIGHTS] == ["model", "ema", "master"]
    with pytest.raises(InvalidRequest, match="'average'") as caught:
        plan.weights_named("average")
    assert caught.value.hint == "one of model, ema, master"
