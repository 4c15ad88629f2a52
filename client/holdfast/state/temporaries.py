"""Refuses temporary values of live objects, such as a `state_dict()`: a restore would not reach the object.

They are recognised by the form of a mapping, and by tensors that share the memory of a live module or optimizer which is not
itself in the state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.state import optimizer_wrappers, streams
from holdfast.state.named import modules_of
from holdfast.state.named_entries import NamedEntry, NamedSnapshot
from holdfast.tensors.fragments import local_tensor
from holdfast.tensors.json_values import DEPTH_MAX, Trail, render
from holdfast.tensors.torch_dtypes import has_memory
from holdfast_formats.errors import InvalidRequest

_SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})


class _Form(NamedTuple):
    """A mapping's form, by its keys, and what to put into the state instead."""

    what: str
    line: str
    fits: Callable[[frozenset[str]], bool]


_FORMS = (
    _Form("the state_dict() of an optimizer", "optimizer", lambda keys: {"state", "param_groups"} <= keys),
    _Form(
        "the flattened state of an optimizer, as torch.distributed.checkpoint's get_state_dict() makes it",
        "optimizer",
        lambda keys: all(any(key.startswith(prefix) for key in keys) for prefix in ("state.", "param_groups.")),
    ),
    _Form("the state_dict() of a learning-rate scheduler", "scheduler", lambda keys: {"last_epoch", "_step_count"} <= keys),
    _Form("the state_dict() of a GradScaler", "scaler", lambda keys: keys == _SCALER),
    _Form(
        "the state_dict() of a StatefulDataLoader",
        "loader",
        lambda keys: "_iterator_finished" in keys and not {"_snapshot", "_num_yielded"}.isdisjoint(keys),
    ),
)


class _Place(NamedTuple):
    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Held(NamedTuple):
    """A tensor inside a plain entry of the state, and where it is."""

    key: str
    trail: Trail
    tensor: torch.Tensor

    @property
    def path(self) -> str:
        return render(self.key, self.trail)


class Temporaries:
    """Checks the plain entries of a state. Memory that belongs to no live object is not searched again."""

    def __init__(self) -> None:
        self._own: set[int] = set()

    def refuse(self, state: Mapping[str, Any]) -> None:
        """`InvalidRequest`, with the line to write, for a temporary mapping or tensor of a live object."""
        plain = [held for key, value in state.items() if _is_plain(key, value) for held in _tensors(key, value, (), ())]
        shared = {_place(held.tensor): held for held in _shared(plain)}
        asked = {place.memory for place in shared} - self._own
        if not asked:
            return
        stored = _as_they_are(state, plain)
        for owner in _live():
            if id(owner) not in stored:
                _refuse_made_by(owner, shared, stored)
        self._own |= asked


def _live() -> list[object]:
    """All modules and optimizers of the process.

    No list of all objects is held between two instructions: if another thread builds a tuple from an iterator meanwhile, it
    gets a `SystemError`, since Python resizes no tuple that something else holds.
    """
    kinds = set(map(type, chain.from_iterable(map(methodcaller("get_objects"), [gc]))))
    # By the order of bases, not isinstance: an object may answer for its class, and do anything then.
    made_of = {kind for kind in kinds if not {nn.Module, Optimizer}.isdisjoint(kind.__mro__)}
    return [one for one in gc.get_referrers(*made_of) if type(one) in made_of]


def _is_plain(key: str, value: object) -> bool:
    """Whether an entry is stored as a plain value, not through a method."""
    asked = (
        bool(modules_of(value)) or isinstance(value, NamedSnapshot | NamedEntry) or optimizer_wrappers.is_optimizer(value)
    )
    return not asked and streams.stateful(key, value) is None


def _tensors(key: str, value: object, trail: Trail, above: tuple[int, ...]) -> Iterator[_Held]:
    """The tensors inside a value. Refuses mappings of a known form, and those that make their tensors at each access."""
    if isinstance(value, torch.Tensor):
        yield _Held(key, trail, value)
    if not isinstance(value, Mapping | list | tuple) or id(value) in above or len(trail) >= DEPTH_MAX:
        return
    items = [(f"[{position}]", item) for position, item in enumerate(value)] if not isinstance(value, Mapping) else []
    if isinstance(value, Mapping):
        _refuse_form(key, trail, frozenset(name for name in value if isinstance(name, str)))
        for name, item in value.items():
            if isinstance(item, torch.Tensor) and not isinstance(value, dict) and value[name] is not item:
                _refuse_made(_Held(key, (*trail, str(name)), item), type(value).__name__)
            items.append((str(name), item))
    for step, item in items:
        if isinstance(item, torch.Tensor | Mapping | list | tuple):
            yield from _tensors(key, item, (*trail, step), (*above, id(value)))


def _refuse_form(key: str, trail: Trail, keys: frozenset[str]) -> None:
    for form in _FORMS:
        if form.fits(keys):
            own = "_".join((key, *(step.strip("[]") for step in trail)))
            line = f'state["{own}"] = {form.line}'
            raise InvalidRequest(
                f"{render(key, trail)} is {form.what}: a copy, so the {form.line} would not receive the restored values",
                hint=f"write {line}, the object itself: Holdfast saves its state, and restores it into the object",
            )


def _refuse_made(held: _Held, kind: str) -> NoReturn:
    raise InvalidRequest(
        f"{held.path}: the {kind} makes this tensor at each access, so a restore into it would be lost",
        hint="store dict(…) of it and use that; or put the object that holds the tensors into the state",
    )


def _shared(plain: Iterable[_Held]) -> Iterator[_Held]:
    """Those whose memory something else uses. Parameters are the trained objects themselves."""
    users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    alone = torch.zeros(1)
    lone = local_tensor(alone)  # nothing but the two has its memory
    least = 0 if users is None else users(lone.untyped_storage()._cdata)
    for held in plain:
        if isinstance(held.tensor, nn.Parameter) or not has_memory(local := local_tensor(held.tensor)) or not local.numel():
            continue
        if users is None or users(local.untyped_storage()._cdata) > least:
            yield held


def _place(tensor: torch.Tensor) -> _Place:
    local = local_tensor(tensor)
    if not has_memory(local):
        return _Place(0, 0, (), ())
    offset = int(local.storage_offset())
    return _Place(local.untyped_storage().data_ptr(), offset, tuple(local.shape), tuple(local.stride()))


def _as_they_are(state: Mapping[str, Any], plain: Iterable[_Held]) -> set[int]:
    """Objects that the state stores directly: its modules and their tensors, optimizers, and its values' tensors."""
    modules = [inner for value in state.values() for module in modules_of(value) for inner in module.modules()]
    tensors = [tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))]
    optimizers = optimizer_wrappers.innermost(state)
    return {id(one) for one in (*modules, *tensors, *optimizers, *(held.tensor for held in plain))}


def _owned(owner: Any) -> Iterator[torch.Tensor]:
    attributes = vars(owner)
    if isinstance(owner, nn.Module):
        for kept in (attributes.get("_parameters"), attributes.get("_buffers")):
            yield from (tensor for tensor in (kept or {}).values() if isinstance(tensor, torch.Tensor))
    else:
        for kept in (attributes.get("state") or {}).values():
            yield from (tensor for tensor in kept.values() if isinstance(tensor, torch.Tensor))


def _refuse_made_by(owner: Any, shared: Mapping[_Place, _Held], stored: set[int]) -> None:
    """Refuse views of a module's tensors, and an optimizer's state."""
    places = (shared.get(_place(tensor)) for tensor in _owned(owner) if id(tensor) not in stored)
    held = next((held for held in places if held is not None), None)
    if held is None:
        return
    kind = "module" if isinstance(owner, nn.Module) else "optimizer"
    line = f'state["{held.key}"] = {"model" if kind == "module" else kind}'
    raise InvalidRequest(
        f"{held.path} shares memory with a tensor of a live {type(owner).__name__}, but is a different tensor, "
        f"from its state_dict() or detach(), and the {kind} is not in the state",
        hint=f"write {line}, the {kind} itself; or, for your own copy, tensor.detach().clone()",
    )
