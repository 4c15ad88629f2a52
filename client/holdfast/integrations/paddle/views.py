"""Tensors of Paddle as torch sees them: views of the same memory, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast_formats.errors import InvalidRequest


class _Seen(NamedTuple):
    tensor: Any  # of Paddle
    address: int
    dtype: object
    shape: list[int]
    strides: list[int]
    view: torch.Tensor

    def is_of(self, tensor: Any) -> bool:
        return (
            tensor is self.tensor
            and tensor.data_ptr() == self.address
            and tensor.dtype == self.dtype
            and tensor.shape == self.shape
            and tensor.strides == self.strides
        )


class Views:
    """The views of named tensors. A name's view is the identical object as long as its tensor has the same memory."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def of(self, name: str, tensor: Any) -> torch.Tensor:
        """The view of this Paddle tensor, which for a parameter is a torch parameter; `InvalidRequest` as `view_of`."""
        seen = self._seen.get(name)
        if seen is None or not seen.is_of(tensor):
            view = view_of(name, tensor)
            view = nn.Parameter(view, requires_grad=False) if is_parameter(tensor) else view
            seen = _Seen(tensor, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.strides, view)
            self._seen[name] = seen
        return seen.view

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all other tensors."""
        if len(self._seen) > len(names):
            self._seen = {name: seen for name, seen in self._seen.items() if name in names}


def view_of(name: str, tensor: Any) -> torch.Tensor:
    """A new view of a Paddle tensor; `InvalidRequest` for one without plain memory, or on a device that torch lacks."""
    if not tensor._is_initialized():
        raise InvalidRequest(
            f"{name} has no memory yet, as under paddle.LazyGuard", hint="call initialize() of the parameter first"
        )
    if tensor.is_dist() or not tensor.is_dense():
        kind = "a distributed tensor of Paddle's auto parallel" if tensor.is_dist() else "sparse"
        raise InvalidRequest(f"{name} is {kind}, and has no plain memory", hint="use dense tensors, as fleet's layers do")
    try:
        view = torch.utils.dlpack.from_dlpack(tensor.detach())
    except Exception as error:  # what Paddle and torch raise for devices and dtypes that one of them lacks
        raise InvalidRequest(
            f"torch cannot share the memory of {name}, a {tensor.dtype} on {tensor.place}: {error}",
            hint="install a torch that supports this device and dtype",
        ) from error
    if view.numel() and view.data_ptr() != tensor.data_ptr():
        raise InvalidRequest(
            f"torch cannot share the memory of {name} on {tensor.place} without a copy",
            hint="install a torch that supports this device",
        )
    return view


def is_parameter(tensor: Any) -> bool:
    from paddle.base.framework import EagerParamBase

    return isinstance(tensor, EagerParamBase)


class LayerViews:
    """A Paddle layer as `module`, a module of torch: parameters and persistable buffers under their structured names, which
    are views of the layer's memory. Each save and restore follows the layer.

    A parameter with `stop_gradient` requires no gradient. Shared parameters are one tensor under several names.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.module = nn.Module()
        self.tensors: dict[str, Any] = {}  # of Paddle, by structured name
        self._views = Views()
        self.module.register_state_dict_pre_hook(self._follow)  # type: ignore[no-untyped-call]
        self._follow()

    def _follow(self, *_: object) -> None:
        """Hold the views of what the layer has now; the identical ones while its memory stays the same."""
        self.tensors = self.layer.state_dict(use_hook=False)
        parameters: dict[str, nn.Parameter | None] = {}
        buffers: dict[str, torch.Tensor | None] = {}
        for name, tensor in self.tensors.items():
            view = self._views.of(name, tensor)
            if isinstance(view, nn.Parameter):
                trained = not tensor.stop_gradient and (view.is_floating_point() or view.is_complex())
                if view.requires_grad != trained:
                    view.requires_grad_(trained)
                parameters[name] = view
            else:
                buffers[name] = view
        self._views.keep(self.tensors)
        for held, now in ((self.module._parameters, parameters), (self.module._buffers, buffers)):
            held.clear()
            held.update(now)  # type: ignore[arg-type]
