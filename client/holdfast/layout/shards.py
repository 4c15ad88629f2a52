"""Allocates a rank's local tensors in memory, and determines what of a checkpoint fills them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from holdfast.read.requests import Want
from holdfast_formats import dtypes, transfer
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.installing import install
from holdfast_formats.layout import parts
from holdfast_formats.layout.parts import LocalTensor, Part
from holdfast_formats.region import Box

Framework = Literal["numpy", "torch"]
Octets = NDArray[np.uint8]


def check_framework(framework: str) -> None:
    """Refuse a framework without arrays for this, before anything is read."""
    if framework not in get_args(Framework):
        raise InvalidRequest(
            f"framework must be one of {', '.join(get_args(Framework))}, not {framework!r}", hint="pass one of these texts"
        )
    if framework == "torch" and find_spec("torch") is None:
        raise InvalidRequest("torch is not installed", hint=f"{install('torch')}; or use numpy arrays")


def nbytes(local: LocalTensor) -> int:
    """Bytes of a local tensor, padding included; `StateMismatch` if it does not end at a byte."""
    return dtypes.nbytes(local.dtype, local.volume, local.name)


def allocate(local: LocalTensor) -> Octets:
    """Memory for a local tensor, with its padding zeroed already."""
    return np.zeros(nbytes(local), np.uint8) if local.padding else np.empty(nbytes(local), np.uint8)


def wants(group: str, local: LocalTensor, octets: Octets) -> Iterator[Want]:
    """The boxes that fill a local tensor's memory."""
    width = dtypes.bits(local.dtype)
    memory = octets.view(transfer.element_dtype(width // 8)) if width % 8 == 0 else octets
    for part in local.parts:
        place = part if width % 8 == 0 else in_octets(part, width, local.name)
        yield Want(group, part.tensor, part.box, parts.view(memory, place))


def in_octets(part: Part, width: int, name: str) -> Part:
    """The place of a part with elements of `width` < 8 bits, counted in bytes; `StateMismatch` if it cuts into a byte."""
    box, steps = part.box, part.strides
    starts = (part.start, *steps[:-1])
    if box.shape and box.shape[-1] * width % 8 == 0 and steps[-1] == 1 and all(n * width % 8 == 0 for n in starts):
        shape = (*box.shape[:-1], box.shape[-1] * width // 8)
        strides = (*(step * width // 8 for step in steps[:-1]), 1)
        return Part(part.tensor, Box((0,) * len(shape), shape), part.start * width // 8, strides)
    if part.stop - part.start == box.volume and part.start * width % 8 == 0 and box.volume * width % 8 == 0:
        return Part(part.tensor, Box((0,), (box.volume * width // 8,)), part.start * width // 8, (1,))  # as one row of bytes
    raise StateMismatch(
        f"tensor {name!r}: {list(box.offset)}+{list(box.shape)} of {part.tensor!r} begins or ends inside a byte",
        hint=f"{width}-bit elements can be split at whole bytes only: shard another dimension",
    )


def array(local: LocalTensor, octets: Octets, framework: Framework) -> Any:
    """The memory as an array or tensor of the local tensor's dtype and shape, without a copy.

    Raises `InvalidRequest` for a dtype that the framework lacks.
    """
    if framework == "numpy":
        return octets.view(dtypes.to_numpy(local.dtype)).reshape(local.shape)
    torch, torch_dtypes = import_module("torch"), import_module("holdfast.tensors.torch_dtypes")
    dtype = torch_dtypes.torch_dtype(local.dtype, local.name)
    shape = torch_dtypes.local_shape(dtype, local.shape)
    return torch.from_numpy(octets).view(dtype).view(shape) if octets.size else torch.empty(shape, dtype=dtype, device="cpu")


def pieces(local: LocalTensor, bytes_max: int) -> Iterator[LocalTensor]:
    """The local tensor as consecutive flat ones of at most `bytes_max` bytes, cut between rows if rows are short."""
    width = dtypes.bits(local.dtype)
    limit = max(bytes_max * 8 // width, 1)
    if local.volume <= limit:
        yield local
        return
    row = next(row for row in (prod(local.shape[d:]) for d in range(1, len(local.shape) + 1)) if row <= limit)
    step = limit // row * row
    for start in range(0, local.volume, step):
        yield parts.flat(local, start, min(start + step, local.volume))
