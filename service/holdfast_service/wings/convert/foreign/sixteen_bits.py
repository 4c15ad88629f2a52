"""Decides whether a checkpoint's 16-bit integers are the bits of bfloat16, which numpy lacks and writes as integers.

The checkpoint itself decides: a program that wrote BF16 needs no integers for it, and Paddle uses U16 for nothing else.
Otherwise the user decides (`--int16`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor

INTEGERS, BFLOAT16 = "integers", "bfloat16"
_UNSIGNED, _SIGNED = "U16", "I16"
_HINT = f"keep them as integers with `import --int16 {INTEGERS}`, or read them as bfloat16 with `--int16 {BFLOAT16}`"


class StoredDtype(NamedTuple):
    """A tensor's dtype in its file."""

    name: str
    dtype: str
    file: str


def taken_for_bfloat16(
    stored: Iterable[StoredDtype], config: Mapping[str, Any], way: str | None, *, of_paddle: bool = False
) -> str | None:
    """The integer dtype whose tensors are bfloat16, if there is one. `config` is the model's config.json.

    `StateMismatch` if neither the checkpoint nor `way` decides.
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
            raise _doubtful(first[asked], f"but {first['BF16'].name!r} is BF16, and Paddle writes only one of the two")
        return asked if asked == _UNSIGNED else None
    narrow = _names_bfloat16(config)
    if "BF16" in first or (asked == _SIGNED and not narrow):
        return None
    evidence = "config.json has dtype bfloat16" if narrow else "no tensor is BF16"
    raise _doubtful(first[asked], f"and {evidence}: its values may be bfloat16, which numpy writes as integers")


def with_bfloat16(tensor: ForeignTensor, dtype: str | None) -> ForeignTensor:
    if tensor.spec.dtype != dtype:
        return tensor
    spec = tensor.spec
    return tensor._replace(spec=type(spec)(spec.group, spec.name, "BF16", spec.shape))


def note(dtype: str) -> str:
    """The note about integers that were read as bfloat16."""
    return f"{dtype} values were read as bfloat16"


def _names_bfloat16(config: Mapping[str, Any]) -> bool:
    """Whether config.json states bfloat16 for the model or one of its parts."""
    parts = [config, *(one for one in config.values() if isinstance(one, Mapping))]
    return any(str(one.get(key)).endswith(BFLOAT16) for one in parts for key in ("dtype", "torch_dtype"))


def _doubtful(one: StoredDtype, why: str) -> StateMismatch:
    return StateMismatch(
        f"tensor {one.name!r} in {one.file} is {one.dtype}, {why}", hint=_HINT, tensor=one.name, file=one.file
    )
