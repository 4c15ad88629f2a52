"""Weights that are rounded (to nearest even) full-precision masters: a slot holds only the masters.

NaN is refused: which of its bits a trainer's own rounding keeps depends on the CPU instructions used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import dtypes
from .errors import StateMismatch
from .tensors import TensorSpec

HELD_AS = "F32"
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00}  # greater bits, without the sign, are NaN
DTYPES = frozenset(_INFINITY)
HINT = "leave out model='from-master' to save weights unchanged"


def possible(weight: TensorSpec, master: TensorSpec) -> bool:
    return weight.dtype in DTYPES and master.dtype == HELD_AS and weight.shape == master.shape


def check(weight: TensorSpec, group: str, master: TensorSpec | None, copied: bool) -> None:
    """Refuse a weight that cannot be made from the master in `group`; `copied`: some rank has staged it."""
    name = f"{weight.group}/{weight.name}"
    if copied:
        raise StateMismatch(
            f"{name} is to be rounded from {group}/{weight.name} on one rank, and copied on another",
            hint="use the same model= on every rank, and give every rank the master, as an empty Fragment if it holds none",
        )
    if master is None or not possible(weight, master):
        what = "which is not saved" if master is None else f"which is {master.dtype}{list(master.shape)}"
        raise StateMismatch(
            f"{name}, {weight.dtype}{list(weight.shape)}, is to be rounded from {group}/{weight.name}, {what}", hint=HINT
        )


def check_rounded(spec: TensorSpec, octets: NDArray[np.uint8]) -> None:
    """Refuse rounded elements with a NaN among them; incomplete elements at the ends are not checked."""
    bits: NDArray[Any] = octets[: octets.nbytes // 2 * 2].view("<u2") & 0x7FFF
    if (bits > _INFINITY[spec.dtype]).any():
        raise nan(spec.name)


def differing(weight: NDArray[Any], master: NDArray[Any], dtype: str) -> tuple[int, int]:
    """The elements of a weight, as unsigned integers, that are not the rounded master's; and NaN masters."""
    with np.errstate(all="ignore"):
        bits = master.astype(dtypes.to_numpy(dtype)).view("<u2")
    return int(np.count_nonzero(bits != weight)), int(np.count_nonzero(bits & 0x7FFF > _INFINITY[dtype]))


def nan(name: str) -> StateMismatch:
    return StateMismatch(
        f"the master of {name!r} has NaN, so its weight cannot be reproduced bit for bit",
        hint=f"{HINT}; a training run with NaN in its masters rarely recovers: restore an older step",
    )
