"""Whether Paddle's tensors have changed: Paddle counts no writes, as torch does."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

COMPARED_MAX = 1 << 14  # elements; of a longer tensor, and of one on a device, only the place is compared


class TensorContents(NamedTuple):
    """What a tensor had at a time. As long as this is held, no other tensor gets the memory of one that is compared."""

    held: Any
    address: int
    values: bytes | None

    def is_of(self, tensor: Any) -> bool:
        """Whether the tensor still has these contents."""
        return self.address == _address(tensor) and self.values == _values(tensor)

    @property
    def zero(self) -> bool:
        """Whether all elements are known to be zero."""
        return self.values is not None and not any(self.values)


def contents_of(tensor: Any) -> TensorContents:
    """The contents that a dense tensor has now."""
    values = _values(tensor)
    return TensorContents(None if values is None else tensor.detach(), _address(tensor), values)


def _address(tensor: Any) -> int:
    """Where the tensor is; 0 without memory, as the `dropout_state` of an LSTM on a CPU: Paddle tells no address of it."""
    return int(tensor.data_ptr()) if tensor._is_initialized() else 0


def size_of(tensor: Any) -> int:
    """The number of elements; Paddle's own `size` is slow."""
    return prod(tensor.shape)


def _values(tensor: Any) -> bytes | None:
    if size_of(tensor) > COMPARED_MAX or not tensor.place.is_cpu_place() or not tensor._is_initialized():
        return None
    values: bytes = tensor.numpy().tobytes()
    return values
