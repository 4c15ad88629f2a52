"""Blocks of codes that a live optimizer keeps of a parameter: which tensors they are, and where these are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.state.partitioned.blocks import Blocks, PartKeys, parts_of_keys, parts_of_wrapper, size_by_key
from holdfast.tensors import wrapped
from holdfast.tensors.fragments import Storable, global_shape, is_dtensor, is_sharded
from holdfast.tensors.live_pieces import Shards, shards_of
from holdfast.tensors.wrapped import Description
from holdfast_formats.errors import InvalidRequest

_LEFT_OUT = "shard with fully_shard (FSDP2) or tensor parallelism, or save without it: save(groups=…)"


class OfParameter(Protocol):
    @property
    def value(self) -> Storable: ...


class LiveBlocks(NamedTuple):
    """Blocks of this rank's part of a parameter, with the tensors of the parts by key. `wrapper` has them inside, if one
    does; `given` is what the optimizer keeps, which may be a DTensor of the wrapper.
    """

    parts: PartKeys
    blocks: Blocks
    tensors: Mapping[str, torch.Tensor]
    wrapper: torch.Tensor | None = None
    given: Any = None

    @property
    def is_local(self) -> bool:
        """Whether the optimizer works on this rank's part, and not on a DTensor."""
        return not is_dtensor(self.given)

    def described(self, path: str) -> Description:
        """The wrapper as one of the whole tensor."""
        assert self.wrapper is not None
        return wrapped.reshaped(wrapped.describe(self.wrapper, path), self.blocks.shards.shape)

    def places(self, value: Storable) -> Iterator[tuple[str, Storable, torch.Tensor | None]]:
        """The key of each tensor, its place, and its memory if the place is that of the parameter `value`."""
        codes, scale = self.tensors[self.parts.codes], self.tensors[self.parts.scale]
        if self.blocks.packed:
            yield self.parts.codes, self.blocks.codes_at(codes, self.blocks.shards.own), None
        else:
            yield self.parts.codes, value, codes
        yield self.parts.scale, self.blocks.scale_at(scale, self.blocks.shards.own), None
        if self.parts.table is not None:
            yield self.parts.table, self.tensors[self.parts.table], None


def blocks_of(parameter: OfParameter, state: Mapping[str, Any], path: str) -> list[LiveBlocks]:
    """All blocks in a parameter's state. `InvalidRequest`, by name, for those of a sharded parameter that could not be put
    together again.
    """
    found = []
    for key, value in state.items():
        if wrapped.is_wrapped(wrapped.held_by(value)):
            one = of_wrapper(parameter, key, value, f"{path}/{key}")
            found += [] if one is None else [one]
    for parts in parts_of_keys(state):
        one = _of_keys(parameter, parts, state, f"{path}/{parts.key}")
        found += [] if one is None else [one]
    return found


def of_wrapper(parameter: OfParameter, key: str, value: Any, path: str) -> LiveBlocks | None:
    """The blocks in a wrapper tensor; None for another kind of wrapper, of a parameter that is not sharded."""
    held = wrapped.held_by(value)
    assert isinstance(held, torch.Tensor)
    inner, shards = wrapped.inner(held, path), shards_of(parameter.value, path)
    parts = parts_of_wrapper(key, list(inner))
    if parts is None or shards is None or not _fits(held, inner, shards):
        if is_sharded(parameter.value):
            raise InvalidRequest(
                f"{path} is a {type(held).__name__}, and its parameter is sharded: it is not known how the blocks of its "
                "values are cut, so no other layout could be restored",
                hint=_LEFT_OUT,
            )
        return None
    codes, scale = inner["codes"], inner["scale"]
    packed = 0 if codes.shape == held.shape else held.numel() // codes.numel()
    blocks = Blocks(held.numel() // scale.numel(), packed, shards)
    if odd := next((box for box in shards.boxes if box.volume % blocks.size), None):
        raise InvalidRequest(
            f"{path} is in blocks of {blocks.size} values, but another rank's part of {list(odd.shape)} has no whole number "
            "of blocks, and is kept there in another form",
            hint="use as many ranks, or a block_size, that parts have whole blocks; or save without it: save(groups=…)",
        )
    return LiveBlocks(parts, blocks, {f"{key}.{name}": tensor for name, tensor in inner.items()}, held, value)


def _fits(held: torch.Tensor, inner: Mapping[str, torch.Tensor], shards: Shards) -> bool:
    codes, scale = inner["codes"], inner["scale"]
    whole = scale.dim() == 1 and scale.numel() > 0 and held.numel() % scale.numel() == 0
    whole = whole and shards.box is not None and shards.box.shape == tuple(held.shape)
    return whole and (codes.shape == held.shape or (codes.dim() == 1 and codes.numel() * 2 == held.numel()))


def _of_keys(parameter: OfParameter, parts: PartKeys, state: Mapping[str, Any], path: str) -> LiveBlocks | None:
    tensors = {key: wrapped.held_by(state[key]) for key in parts.all}
    codes, scale = tensors[parts.codes], tensors[parts.scale]
    if not all(type(tensor) is torch.Tensor for tensor in tensors.values()) or codes.dtype is not torch.uint8:  # type: ignore[attr-defined]
        return None
    assert isinstance(codes, torch.Tensor) and isinstance(scale, torch.Tensor)
    shards, size = shards_of(parameter.value, path), size_by_key(codes.numel(), scale.numel())
    if shards is not None and (shards.box is None or shards.box.shape == tuple(codes.shape)) and size and scale.dim() == 1:
        return LiveBlocks(parts, Blocks(size, 0, shards), tensors, given=state[parts.codes])  # type: ignore[arg-type]
    if is_sharded(parameter.value):
        raise InvalidRequest(
            f"{path} has codes of shape {list(codes.shape)} here and {scale.numel()} scales, and its parameter of shape "
            f"{list(global_shape(parameter.value))} is sharded: it is not known which blocks these are",
            hint=_LEFT_OUT,
        )
    return None
