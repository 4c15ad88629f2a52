"""Tensors of Paddle as torch sees them: views of the same memory, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.integrations.paddle.contents import TensorContents, contents_of
from holdfast.integrations.paddle.fleet.layer_places import LayerPlaces
from holdfast.integrations.paddle.fleet.places import empty
from holdfast.integrations.paddle.fleet.ranks import RankTensor
from holdfast.integrations.paddle.program import Live, program_of, unlike_torch
from holdfast.integrations.paddle.watch import LayerWatch, TensorForms, identical
from holdfast.tensors.fragments import Fragment
from holdfast.tensors.torch_dtypes import safetensors_name, torch_dtype
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.programs import Program
from holdfast_formats.region import Shape


class _Seen(NamedTuple):
    """A tensor of Paddle, its form, and its view. Two dtypes are compared as parts of a form: Paddle's own `==` is slow."""

    tensor: Any
    form: tuple[object, ...]
    view: torch.Tensor

    def is_of(self, tensor: Any) -> bool:
        return tensor is self.tensor and _form(tensor) == self.form


def _form(tensor: Any) -> tuple[object, ...]:
    """Address, dtype, shape and strides."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.strides


class Views:
    """The views of named tensors. A name's view is the identical object as long as its tensor has the same memory."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def of(self, name: str, tensor: Any, parameter: bool = False, turned: bool = False) -> torch.Tensor:
        """The view of this Paddle tensor, as a torch parameter if it is to be one, and of a matrix the transposed one if it
        is `turned`; `InvalidRequest` as `view_of`.
        """
        seen = self._seen.get(name)
        if seen is None or not seen.is_of(tensor):
            view = view_of(name, tensor)
            view = view.t() if turned and view.dim() == 2 else view
            view = nn.Parameter(view, requires_grad=False) if parameter else view
            seen = self._seen[name] = _Seen(tensor, _form(tensor), view)
        return seen.view

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all other tensors."""
        if len(self._seen) > len(names):
            self._seen = {name: seen for name, seen in self._seen.items() if name in names}


def view_of(name: str, tensor: Any) -> torch.Tensor:
    """A new view of a Paddle tensor; `InvalidRequest` for one without plain memory, or on a device that torch lacks."""
    import paddle

    if not paddle.in_dynamic_mode():  # Paddle would crash
        raise InvalidRequest(
            f"{name} cannot be read while Paddle builds static programs", hint="call paddle.disable_static() first"
        )
    if not tensor._is_initialized() and 0 not in tensor.shape:
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
    return isinstance(tensor, _parameter_class())


def is_buffer(name: str, tensor: Any) -> bool:
    """Whether a forward may change this tensor, and on each rank in another way. Parameters among them are what layers of
    Paddle keep for themselves: `_mean` and `_variance` of a BatchNorm, `_scale` of a quantised layer.
    """
    return not is_parameter(tensor) or (name.rpartition(".")[2].startswith("_") and tensor.stop_gradient)


@cache
def _parameter_class() -> type:
    from paddle.base.framework import EagerParamBase

    found: type = EagerParamBase
    return found


class LayerViews:
    """A Paddle layer as `module`, a module of torch: parameters and persistable buffers under their structured names, which
    are views of the layer's memory. Each save and restore follows the layer.

    A parameter with `stop_gradient` requires no gradient; one that `is_buffer` is a buffer. Shared parameters are one tensor
    under several names. A buffer that is not persistable is an empty one here, another one whenever it has changed: a save
    names it then.
    """

    def __init__(self, layer: Any) -> None:
        self.places = LayerPlaces(layer)
        self.module = nn.Module()
        self.tensors: dict[str, Any] = {}  # of Paddle, by structured name
        self._empty: dict[str, Other] = {}  # tensors that only other ranks have
        self._views = Views()
        self._buffers: dict[str, torch.Tensor] = {}
        self._transient: dict[str, _Transient] = {}
        self._known: _Known | None = None
        self._unlike: frozenset[str] | None = None  # the names that the program of the layer changes, if it has one
        self.module.register_state_dict_pre_hook(self._follow)  # type: ignore[no-untyped-call]
        self._follow()

    def shard(self, name: str, view: torch.Tensor) -> Any:
        """What is stored of this tensor of `module`: itself, or Fragments, where this rank has a part of it."""
        if name in self._empty:
            return self._empty[name].declared
        tensor = self.tensors[name]
        return self.places.declared(name, tensor, view) if is_parameter(tensor) else view

    def whole(self, name: str) -> tuple[Shape, str]:
        """The shape of the whole tensor and its dtype, by safetensors' name."""
        tensor, view = self.tensors[name], (self.module._parameters.get(name), self.module._buffers.get(name))
        dtype = next(one.dtype for one in view if one is not None)
        shape = self.places.place(name, tensor).shape if is_parameter(tensor) else tuple(tensor.shape)
        return shape, safetensors_name(dtype, name)

    def program(self, share: Callable[[Live], Live]) -> Program:
        """The layer's own program, as `program_of`. From now on, `module` refuses tensors that it would store wrongly."""
        self._unlike = None
        self._follow()
        self._unlike = unlike_torch(self.places.layer, self.tensors)
        return program_of(self.places.layer, self.tensors, share)

    def add_other(self, name: str, listed: RankTensor) -> None:
        """A tensor of other ranks, which `module` has too from the next look on, without elements."""
        dtype = torch_dtype(listed.dtype, name)
        tensor = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=bool(listed.group))
        self._empty[name] = Other(tensor, empty(listed.shape, dtype))
        self._known = None

    def _follow(self, *_: object) -> None:
        """Hold the views of what the layer has now; the identical ones while its memory stays the same."""
        if self._known is None or not self._known.unchanged:
            self._known = None  # in case that something is refused
            self._hold(self.places.tensors())
        self._transient = {name: one.now() for name, one in self._transient.items()}
        _put(self.module._buffers, {**self._buffers, **{name: one.stands for name, one in self._transient.items()}})

    def _hold(self, tensors: dict[str, Any]) -> None:
        if self._unlike is not None and not _same(self.tensors, tensors):
            self._refuse_unmade(tensors, self._unlike)
        self.tensors = tensors
        parameters: dict[str, torch.Tensor] = {name: other.tensor for name, other in self._empty.items()}
        buffers: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            trainable = not is_buffer(name, tensor)
            turned = self.places.adapter is not None and self.places.place(name, tensor).turned
            view = self._views.of(name, self.places.held(name, tensor), trainable, turned)
            if trainable:
                trained = not tensor.stop_gradient and (view.is_floating_point() or view.is_complex())
                if view.requires_grad != trained:
                    view.requires_grad_(trained)
                parameters[name] = view
            else:
                buffers[name] = view
        self._views.keep(self.tensors)
        self.places.keep(self.tensors)
        self._buffers, self._transient = buffers, self._transient_now()
        self.module._non_persistent_buffers_set = set(self._transient)
        _put(self.module._parameters, parameters)
        if not self.places.sharded:
            self._known = _Known(LayerWatch(self.places.layer), TensorForms(list(self.tensors.values())))

    def _refuse_unmade(self, tensors: Mapping[str, Any], unlike: frozenset[str]) -> None:
        """Raise `InvalidRequest` for tensors of layers that are not those of which the program was made."""
        changed = sorted((unlike ^ unlike_torch(self.places.layer, tensors)) & tensors.keys())
        if changed:
            raise InvalidRequest(
                f"the layer of {changed[0]!r} was added or replaced after the mapping program of the model was made, which "
                "would store its tensors in another form than torch's",
                hint="attach again after layers were added: close() this one, then attach(model, optimizer, …) or "
                "Checkpointer(…, state(model, optimizer)), and goes_on_from(step) to save on in the same run",
                tensors=changed,
            )

    def _transient_now(self) -> dict[str, _Transient]:
        """The buffers that are not persistable. Each has the stand-in that it had."""
        stored, before = set(map(id, self.tensors.values())), self._transient
        now = {name: one for name, one in self.places.layer.named_buffers() if id(one) not in stored and one.is_dense()}
        return {name: before[name]._replace(tensor=one) if name in before else _stand_in(one) for name, one in now.items()}


class _Transient(NamedTuple):
    """A buffer that is not persistable, what it had, and the empty tensor that stands for it as long as it has that."""

    tensor: Any
    contents: TensorContents
    stands: torch.Tensor

    def now(self) -> _Transient:
        return self if self.contents.is_of(self.tensor) else _stand_in(self.tensor)


def _stand_in(tensor: Any) -> _Transient:
    return _Transient(tensor, contents_of(tensor), torch.empty(0))


class _Known(NamedTuple):
    """A layer that was looked at."""

    layer: LayerWatch
    forms: TensorForms

    @property
    def unchanged(self) -> bool:
        return self.layer.unchanged and self.forms.unchanged


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether these are the identical objects under the same names."""
    return list(before) == list(now) and identical(list(before.values()), list(now.values()))


def _put(held: dict[str, Any], now: Mapping[str, Any]) -> None:
    """Let a container of the module hold these. Equal names stay the identical objects, by which a save sees no change."""
    if not _same(held, now):
        held.clear()
        held.update(now)


class Other(NamedTuple):
    """No element of a tensor of other ranks, as a module of torch has it and as it is stored."""

    tensor: nn.Parameter
    declared: Fragment
