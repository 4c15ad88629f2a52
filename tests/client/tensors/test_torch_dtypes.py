"""torch's element types and their names in files."""

from __future__ import annotations

import pytest
import torch

from holdfast.tensors import torch_dtypes
from holdfast_formats import dtypes
from holdfast_formats.errors import InvalidRequest

NAMED = sorted(torch_dtypes._TO_SAFETENSORS, key=str)


@pytest.mark.parametrize("dtype", NAMED, ids=str)
def test_every_dtype_has_the_width_of_its_name(dtype):
    """A dtype maps to a safetensors name of the same width, and back to itself."""
    name = torch_dtypes.safetensors_name(dtype)
    assert torch_dtypes.torch_dtype(name) == dtype
    assert dtypes.bits(name) * torch_dtypes.packing(dtype) == 8 * dtype.itemsize


def test_names_agree_with_the_safetensors_library():
    """The names are those that safetensors itself writes for the same tensors."""
    from safetensors.torch import save

    for dtype in NAMED:
        encoded = save({"t": torch.zeros(4, 8, dtype=torch.uint8).view(dtype)})
        assert f'"dtype":"{torch_dtypes.safetensors_name(dtype)}"'.encode() in encoded


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_float4_counts_pairs():
    """torch counts float4 in pairs, the format counts elements: the last dimension doubles."""
    packed = torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert torch_dtypes.element_shape(packed) == (3, 8)
    assert torch_dtypes.local_shape(packed.dtype, (3, 8)) == (3, 4)
    with pytest.raises(InvalidRequest, match="'w'"):
        torch_dtypes.element_shape(packed[0, 0], "w")


def test_unknown_names_are_refused():
    """A dtype that one side does not have is refused by the tensor's name."""
    with pytest.raises(InvalidRequest, match=r"'w'.*complex128"):
        torch_dtypes.safetensors_name(torch.complex128, "w")
    with pytest.raises(InvalidRequest, match=r"'w'.*F6_E2M3"):
        torch_dtypes.torch_dtype("F6_E2M3", "w")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conj"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "lazy"),
        (lambda: torch.empty(2, dtype=torch.bits8), "bits8"),
    ],
)
def test_what_is_no_plain_memory_is_refused_by_name(make, reason):
    """Sparse, meta, lazy and nameless tensors are refused with the tensor's name and the reason."""
    with pytest.raises(InvalidRequest, match=rf"'group/w'.*{reason}"):
        torch_dtypes.check_storable(make(), "group/w")


def test_quantized_tensors_are_refused_by_name():
    """A quantized tensor carries scales beside its memory, so it is refused."""

    class Quantized(torch.Tensor):
        is_quantized = True

    with pytest.raises(InvalidRequest, match="'w' is quantized"):
        torch_dtypes.check_storable(torch.zeros(2).as_subclass(Quantized), "w")
