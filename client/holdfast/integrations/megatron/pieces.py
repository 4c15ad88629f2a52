"""Maps each range of a Megatron parameter to a stored tensor, from `sharded_state_dict()`.

A local parameter is a row of elements in memory. Megatron states for it, or for each part that a `ShardedTensorFactory`
cuts out of it (gate and up of one matrix), which box of a global tensor it is. A `ParameterPiece` states this for a
range of the row. The same pieces place the parameter, its full-precision copy, and its moments, whole or a flat range
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape

EXPERTS = ".experts."


class ParameterPiece(NamedTuple):
    """The elements from `start` on of a local tensor, in its row-major order, are the box at `offset` of a stored tensor.

    `shape` is that of the stored tensor, `box` that of the box.
    """

    name: str
    shape: Shape
    offset: Shape
    box: Shape
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.box)

    def of(self, tensor: torch.Tensor) -> Fragment:
        part = tensor.detach().view(-1)[self.start : self.stop].view(self.box)
        return Fragment(part, self.shape, offset=self.offset)

    def within(self, flat: torch.Tensor, begin: int) -> Fragment:
        """This piece's part of a flat tensor with the local elements from `begin` on; may be empty."""
        first, last = max(self.start, begin), min(self.stop, begin + flat.numel())
        last = max(first, last)
        part = flat.detach()[max(first - begin, 0) : max(last - begin, 0)]
        if not part.numel():
            return empty(self.shape, flat.dtype, flat.device)
        return Fragment(part, self.shape, offset=self.offset, box=self.box, flat=(first - self.start, last - self.start))


class Stored(NamedTuple):
    """A tensor of the model: the live object, its name in the module, and all its pieces."""

    tensor: torch.Tensor
    own: str
    pieces: tuple[ParameterPiece, ...]


class ModelTensors(NamedTuple):
    """`sharded_state_dict()` of all parts of the model on this rank.

    `modules` are those with a value of their own (`get_extra_state`), by a name that is unique among all ranks.
    """

    tensors: tuple[Stored, ...]
    modules: dict[str, torch.nn.Module]


def empty(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Fragment:
    """No element of a tensor of this shape."""
    return Fragment(torch.empty(0, dtype=dtype, device=device), shape, flat=(0, 0))


def read(chunks: Sequence[Any]) -> ModelTensors:
    """The tensors of a model's unwrapped parts. Raises `InvalidRequest` for entries that are no views of live tensors,
    and for unknown objects.
    """
    tensors: list[Stored] = []
    modules: dict[str, torch.nn.Module] = {}
    for number, chunk in enumerate(chunks):
        if not callable(getattr(chunk, "sharded_state_dict", None)):
            raise InvalidRequest(
                f"part {number} of the model, a {type(chunk).__name__}, has no sharded_state_dict()",
                hint="derive it from megatron.core.transformer.MegatronModule",
            )
        live = _Live(chunk)
        for own, value in _leaves(_sharded_state(chunk), ""):
            _take(own, value, live, tensors, modules)
        live.check_complete([one.tensor for one in tensors])
    return ModelTensors(tuple(tensors), modules)


def _sharded_state(chunk: Any) -> Mapping[str, Any]:
    from megatron.core import parallel_state

    # Layers by number rather than stacked, so that a name is one layer's. The group is the default of 0.16.1; without it
    # 0.16.1 takes the tensor-parallel rank of every tensor for 0.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state_dict = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True, "dp_cp_group": group})
    if not isinstance(state_dict, Mapping):
        raise InvalidRequest(f"sharded_state_dict() of {type(chunk).__name__} returns a {type(state_dict).__name__}")
    return state_dict


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _take(own: str, value: Any, live: _Live, tensors: list[Stored], modules: dict[str, torch.nn.Module]) -> None:
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

    if isinstance(value, LocalNonpersistentObject):
        return
    if isinstance(value, ShardedObject):
        if value.data is not None or own.endswith("_extra_state"):
            modules[value.unique_key] = live.owner(own)
    elif isinstance(value, ShardedTensor):
        tensor = live.whole(own, value.data)
        tensors.append(Stored(tensor, own, (_piece(own, value, tensor),)))
    elif isinstance(value, ShardedTensorFactory):
        tensor = live.whole(own, value.data)
        parts = [part for _, part in _leaves(value.build(), "")]
        strange = [type(part).__name__ for part in parts if not isinstance(part, ShardedTensor)]
        if strange:
            raise InvalidRequest(f"{own}: its ShardedTensorFactory builds a {strange[0]}; only tensors are supported")
        pieces = tuple(sorted((_piece(own, part, tensor) for part in parts), key=lambda piece: piece.start))
        _check_tiled(own, tensor, pieces)
        tensors.append(Stored(tensor, own, pieces))
    else:
        raise InvalidRequest(
            f"{own}: sharded_state_dict() returns a {type(value).__name__} for it",
            hint="only ShardedTensor, ShardedTensorFactory and ShardedObject can be stored",
        )


def _piece(own: str, part: Any, tensor: torch.Tensor) -> ParameterPiece:
    """The piece of a `ShardedTensor` over all of a local tensor, or over a range of it."""
    data = part.data
    if getattr(part, "flattened_range", None) is not None:
        raise InvalidRequest(
            f"{own}: sharded_state_dict() returns a flattened range; use megatron-core 0.16 or newer, which does not"
        )
    same = data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and data.dtype == tensor.dtype
    start = data.storage_offset() - tensor.storage_offset()
    if not same or not data.is_contiguous() or start < 0 or start + data.numel() > tensor.numel():
        raise InvalidRequest(
            f"{own}: its ShardedTensorFactory makes a tensor of shape {list(data.shape)} that is not a contiguous "
            "part of the parameter's memory, so a restore into it would be lost",
            hint="such layers (grouped experts, Mamba) are not supported; use SequentialMLP for experts",
        )
    leading = part.prepend_axis_num
    return ParameterPiece(
        _named(part.key, part.global_offset[:leading]),
        tuple(int(size) for size in part.global_shape[leading:]),
        tuple(int(at) for at in part.global_offset[leading:]),
        tuple(int(size) for size in data.shape),
        start,
    )


def _named(key: str, leading: Sequence[int]) -> str:
    """The stored name: indices on further axes, such as experts, become part of it."""
    if not leading:
        return key
    numbers = ".".join(map(str, leading))
    if EXPERTS in key:
        before, after = key.split(EXPERTS, 1)
        return f"{before}{EXPERTS}{numbers}.{after}"
    return f"{key}.{numbers}"


def _check_tiled(own: str, tensor: torch.Tensor, pieces: Sequence[ParameterPiece]) -> None:
    at = 0
    for piece in pieces:
        if piece.start != at:
            break
        at = piece.stop
    if at != tensor.numel():
        raise InvalidRequest(
            f"{own}: the parts that its ShardedTensorFactory builds do not cover each element of the parameter once"
        )


class _Live:
    def __init__(self, chunk: torch.nn.Module) -> None:
        self._chunk = chunk
        held = [*chunk.parameters(), *chunk.buffers()]
        self._by_place = {place(tensor): tensor for tensor in reversed(held)}

    def whole(self, own: str, data: Any) -> torch.Tensor:
        """The parameter or buffer that is this tensor; raises `InvalidRequest` if there is none."""
        if not isinstance(data, torch.Tensor):
            raise InvalidRequest(f"{own}: sharded_state_dict() returns a {type(data).__name__} for it, not a tensor")
        if type(data) not in (torch.Tensor, torch.nn.Parameter):
            raise InvalidRequest(
                f"{own} is a {type(data).__name__}, whose memory cannot be stored unchanged",
                hint="parameters in FP8 are not supported: train without fp8_param, so that they are in bfloat16",
            )
        live_tensor = self._by_place.get(place(data))
        if live_tensor is None:
            raise InvalidRequest(
                f"{own}: sharded_state_dict() makes a tensor of shape {list(data.shape)} for it that is not a parameter or "
                "buffer of the module, so a restore into it would be lost"
            )
        if not live_tensor.is_contiguous():
            raise InvalidRequest(f"{own} is not contiguous, so its elements cannot be located")
        return live_tensor

    def owner(self, own: str) -> torch.nn.Module:
        """The module whose extra state has this name."""
        path, _, name = own.rpartition(".")
        try:
            if name == "_extra_state":
                return self._chunk.get_submodule(path)
        except AttributeError:
            pass
        raise InvalidRequest(
            f"{own}: sharded_state_dict() returns an object for it that is not the extra state of a module",
            hint="return it from the module's get_extra_state(), as a tensor of dtype uint8",
        )

    def check_complete(self, stored: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that `sharded_state_dict()` leaves out: their training would be lost."""
        known = {place(tensor) for tensor in stored}
        left = [name for name, tensor in self._chunk.named_parameters() if tensor.numel() and place(tensor) not in known]
        if left:
            raise InvalidRequest(
                f"sharded_state_dict() leaves out {len(left)} parameters of {type(self._chunk).__name__}: "
                f"{', '.join(left[:5])}",
                hint="return them from sharded_state_dict() of the modules that own them",
            )


def place(tensor: torch.Tensor) -> tuple[int, int, torch.Size, torch.dtype]:
    """Identifies a tensor among those that do not share its memory."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape, tensor.dtype
