"""The values of blocks of codes, and values as codes, by the optimizer's own arithmetic where its class has any."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.state.partitioned.live import LiveBlocks
from holdfast.tensors import wrapped
from holdfast.tensors.wrapped import Description
from holdfast_formats.errors import StateMismatch


def of_wrapper(wrapper: torch.Tensor, path: str) -> torch.Tensor:
    """The values of a wrapper as float32; `StateMismatch` if its class cannot tell."""
    try:
        found = wrapper.dequantize().float()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise _unable(wrapper, path, error) from error
    if wrapped.is_wrapped(found):
        raise _unable(wrapper, path, "dequantize() returns no plain tensor")
    return found


def of_keys(parts: Mapping[str, torch.Tensor], size: int) -> torch.Tensor:
    """The values of plain codes, scales and a table of what each code stands for."""
    codes = parts["codes"]
    spread = parts["scale"].float().repeat_interleave(size)[: codes.numel()]
    return (parts["qmap"].float()[codes.long().view(-1)] * spread).view(codes.shape)


def put(live: LiveBlocks, given: torch.Tensor) -> float:
    """Write values as codes; return how far one moved, in units of the largest of its block."""
    size, path = live.blocks.size, live.parts.key
    blocks = _in_blocks(given, size)
    largest = blocks.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    if live.wrapper is None:
        codes, scale = live.tensors[live.parts.codes], live.tensors[live.parts.scale]
        table = live.tensors[live.parts.table or ""]
        nearest = _nearest(blocks / largest[:, None], table.float())
        codes.copy_(nearest.view(-1)[: given.numel()].view(given.shape))
        scale.copy_(blocks.abs().amax(1))
        found = of_keys({"codes": codes, "scale": scale, "qmap": table}, size)
    else:
        try:
            live.wrapper.copy_(given.to(live.wrapper.dtype))
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise _unable(live.wrapper, path, error) from error
        found = of_wrapper(live.wrapper, path)
    return float(((_in_blocks(found, size) - blocks).abs() / largest[:, None]).max())


def appearance(kind: type[torch.Tensor], description: Description, path: str) -> torch.dtype:
    """The dtype that a wrapper shows, which an optimizer gives to a part that it does not quantise."""
    context = description["context"]
    names = [item[1] for item in (context[1] if isinstance(context, list) else []) if isinstance(item, list)]
    dtypes = [getattr(torch, name) for name in names if isinstance(name, str)]
    shown = [dtype for dtype in dtypes if isinstance(dtype, torch.dtype)]
    if len(shown) != 1:
        raise _unable(kind, path, "it does not say which dtype it has")
    return shown[0]


def _in_blocks(given: torch.Tensor, size: int) -> torch.Tensor:
    line = given.float().reshape(-1)
    return torch.nn.functional.pad(line, (0, -line.numel() % size)).view(-1, size)


def _nearest(given: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The code of the nearest value of a sorted table."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(given, middles).to(torch.uint8)


def _unable(wrapper: object, path: str, why: object) -> StateMismatch:
    name = wrapper.__name__ if isinstance(wrapper, type) else type(wrapper).__name__
    return StateMismatch(
        f"{path}: {name} cannot quantise values again: {why}",
        hint="restore on as many ranks as saved it, or leave the optimizer's state out: restore(groups=…)",
    )
