"""A stored tensor (a tensor spec), and one rank's part of it (a fragment)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from math import prod

import msgspec

from . import dtypes
from .errors import InvalidRequest, LimitExceeded
from .region import Box, Shape, byte_box, check_box

NAME_BYTES_MAX = 1024
DIMENSIONS_MAX = 64
FORMS_KEPT = 2**12
RESERVED = "__metadata__"


class TensorSpec(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A global tensor: its group, its name (unique in the group), safetensors dtype and shape in elements."""

    group: str
    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        bits = _form_bits(self.dtype, self.shape)
        return dtypes.nbytes(self.dtype, prod(self.shape), self.name) if bits % 8 else bits // 8

    def check(self) -> None:
        """Refuse what no file could hold."""
        check_name(self.name)
        check_form(self.name, self.dtype, self.shape)


@lru_cache(FORMS_KEPT)  # 100 000 tensors have a few hundred forms
def _form_bits(dtype: str, shape: Shape) -> int:
    return dtypes.bits(dtype) * prod(shape)


def check_names(names: Collection[str]) -> None:
    """`check_name` of many, all at once as long as they are plain."""
    lengths = list(map(len, names))
    plain = min(lengths, default=1) and max(lengths, default=1) <= NAME_BYTES_MAX and "".join(names).isascii()
    if not plain or RESERVED in names:
        for name in names:
            check_name(name)


def check_name(name: str) -> None:
    """Refuse a name that no file could hold."""
    plain = name.isascii()
    if not name or (len(name) if plain else len(name.encode(errors="surrogatepass"))) > NAME_BYTES_MAX:
        raise LimitExceeded(f"tensor name {name[:80]!r} must have 1 to {NAME_BYTES_MAX} bytes")
    if name == RESERVED:
        raise InvalidRequest(f"a tensor cannot be named {RESERVED!r}: safetensors reserves that name")
    if not plain:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"tensor name {name!r} is not valid Unicode") from None


def check_form(name: str, dtype: str, shape: Shape) -> int:
    """The bytes of a tensor; refuses an impossible shape, an unknown dtype, and sub-byte elements that do not end at a
    byte.
    """
    if len(shape) > DIMENSIONS_MAX or any(n < 0 for n in shape):
        raise InvalidRequest(f"tensor {name!r}: shape {list(shape)} is not a shape")
    return dtypes.nbytes(dtype, prod(shape), name)


class StagedFragment(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A rank's part of a tensor: boxes, and the places of their bytes (row-major) in the rank's slot.

    The boxes' bytes follow each other from `slot_offset` on. A flat range is the few boxes of `region.flat_boxes`, so later
    code has boxes only. `placement` is the framework's description, as text. With `rounded_from`, no slot has any byte of
    it: it is the tensor of the same name in that group, rounded to nearest even. `frozen`: nothing in the rank's state
    trains it, so its bytes are expected to stay. That is no proof: only digests are.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    slot_offset: int
    placement: str = ""
    rounded_from: str = ""
    frozen: bool = False

    @property
    def nbytes(self) -> int:
        return sum(box_bytes(self.spec, box) for box in self.boxes)

    def check(self) -> None:
        """Refuse boxes outside the tensor or cut inside a byte, and boxes of a tensor that is in no slot."""
        self.spec.check()
        if self.rounded_from and self.boxes:
            raise InvalidRequest(
                f"tensor {self.spec.name!r} is rounded from {self.rounded_from!r}, but has parts of its own"
            )
        for box in self.boxes:
            check_box(box, self.spec.shape, self.spec.name)
            byte_box(self.spec.dtype, box, self.spec.shape, self.spec.name)


def box_bytes(spec: TensorSpec, box: Box) -> int:
    """Bytes of one box of this tensor; `StateMismatch` if it does not end at a byte."""
    return dtypes.nbytes(spec.dtype, box.volume, spec.name)
