"""Which 16-bit integers of a checkpoint are the bits of bfloat16. numpy has no such dtype, and writes them as integers.

The checkpoint itself decides: a program that wrote BF16 as such has no need of integers for it, and Paddle has no U16 other
than these bits. Where nothing decides, the user does (`--int16`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.foreign.listing import ForeignTensor

INTEGERS, BFLOAT16 = "integers", "bfloat16"
WAYS = (INTEGERS, BFLOAT16)  # what `--int16` takes
_UNSIGNED, _SIGNED = "U16", "I16"
_HINT = f"say what they are: `import --int16 {INTEGERS}` keeps them, `--int16 {BFLOAT16}` takes them for bfloat16"


class StoredDtype(NamedTuple):
    """The dtype that a file says of a tensor."""

    name: str
    dtype: str
    file: str


def taken_for_bfloat16(
    stored: Iterable[StoredDtype], config: Mapping[str, Any], way: str | None, *, of_paddle: bool = False
) -> str | None:
    """The integer dtype whose tensors are bfloat16; None if there is none. `config` is the model's config.json.

    `StateMismatch`, by tensor and file, where neither the checkpoint nor `way` (one of `WAYS`) says it.
    """
    first: dict[str, StoredDtype] = {}
    for one in stored:
        first.setdefault(one.dtype, one)
    asked = next((dtype for dtype in (_UNSIGNED, _SIGNED) if dtype in first), None)
    if asked is None or way == INTEGERS:
        return None
    if way == BFLOAT16:
        return asked
    if of_paddle:
        if asked == _UNSIGNED and "BF16" in first:
            raise _doubtful(first[asked], f"and {first['BF16'].name!r} is BF16: Paddle writes the one or the other")
        return asked if asked == _UNSIGNED else None
    narrow = _says_bfloat16(config)
    if "BF16" in first or (asked == _SIGNED and not narrow):
        return None
    said = "config.json says bfloat16" if narrow else "no tensor is BF16"
    raise _doubtful(first[asked], f"and {said}: it may be the bits of bfloat16, as numpy writes them")


def with_bfloat16(tensor: ForeignTensor, dtype: str | None) -> ForeignTensor:
    """The tensor as BF16, if it is of the integer `dtype`, which has the same width."""
    if tensor.spec.dtype != dtype:
        return tensor
    spec = tensor.spec
    return tensor._replace(spec=type(spec)(spec.group, spec.name, "BF16", spec.shape))


def note(dtype: str) -> str:
    """What the report says of integers that were taken for bfloat16."""
    return f"bfloat16 was stored as {dtype}, its bits"


def _says_bfloat16(config: Mapping[str, Any]) -> bool:
    """Whether a model, or one of those that it is made of, is in bfloat16 by its config.json."""
    parts = [config, *(one for one in config.values() if isinstance(one, Mapping))]
    return any(str(one.get(key)).endswith(BFLOAT16) for one in parts for key in ("dtype", "torch_dtype"))


def _doubtful(one: StoredDtype, why: str) -> StateMismatch:
    return StateMismatch(
        f"tensor {one.name!r} in {one.file} is {one.dtype}, {why}", hint=_HINT, tensor=one.name, file=one.file
    )
