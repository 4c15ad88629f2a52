"""Casts stored floats to another live dtype: rounded to nearest even, as torch's `.to` does, and reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from holdfast.left_out import LeftOutNote
from holdfast.tensors.leaves import Leaf
from holdfast.tensors.torch_dtypes import torch_dtype
from holdfast_formats.errors import StateMismatch

# Only self-contained values. Floats of 8 and 4 bits come with scales, so their bits alone are no weights.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
LISTED_MAX = 5


class Cast(NamedTuple):
    """A live leaf, and its copy in memory of the stored dtype, which is filled first."""

    live: Leaf
    stored: Leaf


def possible(stored: str, live: str) -> bool:
    """Whether values of a stored dtype may be rounded, or widened, to a live one."""
    return stored != live and stored in FLOATS and live in FLOATS


def apart(live: Leaf, dtype: str) -> Cast:
    """The cast of a leaf that is stored with this dtype. Its new memory is on the CPU, the target of file reads."""
    kind = torch_dtype(dtype, live.path)
    pieces = tuple(
        piece._replace(tensor=torch.zeros(tuple(piece.tensor.shape), dtype=kind, device="cpu")) for piece in live.pieces
    )
    return Cast(live, live._replace(dtype=dtype, pieces=pieces))


def leaves_apart(leaves: Iterable[Leaf], casts: Sequence[Cast]) -> list[Leaf]:
    memory = {piece.tensor.untyped_storage().data_ptr() for cast in casts for piece in cast.stored.pieces}
    return [leaf for leaf in leaves if any(piece.tensor.untyped_storage().data_ptr() in memory for piece in leaf.pieces)]


def check(casts: Sequence[Cast]) -> None:
    """Raise what `fill` would raise, without changing live tensors."""
    with torch.no_grad():
        for live, stored in casts:
            for into, read in zip(live.pieces, stored.pieces, strict=True):
                _refuse_too_large(live, read.tensor, read.tensor.to(into.tensor.dtype))


def fill(casts: Sequence[Cast]) -> None:
    """Write the read values into the live tensors; `StateMismatch` for a finite value that overflows the live dtype."""
    with torch.no_grad():
        for live, stored in casts:
            for into, read in zip(live.pieces, stored.pieces, strict=True):
                rounded = read.tensor.to(into.tensor.dtype)
                _refuse_too_large(live, read.tensor, rounded)
                into.tensor.copy_(rounded)


def _refuse_too_large(live: Leaf, read: torch.Tensor, rounded: torch.Tensor) -> None:
    if torch.finfo(rounded.dtype).max >= torch.finfo(read.dtype).max:
        return
    finite = torch.isfinite(read)
    if not bool(torch.isfinite(rounded)[finite].all()):
        raise StateMismatch(
            f"{live.path}: stored values up to {float(read[finite].abs().max()):.3g} do not fit into {live.dtype}",
            hint="use a live dtype with more range, or exclude this name with exclude=",
        )


def notes(casts: Sequence[Cast]) -> list[str]:
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for live, stored in casts:
        names[f"{stored.dtype} to {live.dtype}"][live.path] = None
    return [
        LeftOutNote(
            f"{len(tensors)} {'tensor was' if len(tensors) == 1 else 'tensors were'} cast from {kinds} "
            f"({', '.join(list(tensors)[:LISTED_MAX])}{', …' if len(tensors) > LISTED_MAX else ''})"
        )
        for kinds, tensors in names.items()
    ]
