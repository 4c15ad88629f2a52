"""Detects whether the live state still has the structure that an earlier save found, without another walk through it.

A walk records the containers with their contents, the objects that hold the containers, and the tensors with their memory.
Another walk would find the same as long as every holder has the identical containers, these hold the identical objects, and
every tensor has the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import eq, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.state import optimizer_wrappers
from holdfast.state.modules import wrapped
from holdfast.state.named import Named
from holdfast.state.optimizer_shards import ShardedOptimizer
from holdfast.tensors.fragments import Fragment, FragmentList, Storable, is_dtensor, parts_of
from holdfast.tensors.wrapped import held_by, is_wrapped
from holdfast.tensors.wrapped import inner as inner_tensors

_PLAIN_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_CONTAINERS = ("_parameters", "_buffers", "_modules", "_state_dict_pre_hooks", "_state_dict_hooks")


class _Seen(NamedTuple):
    mapping: Mapping[Any, Any]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @property
    def unchanged(self) -> bool:
        held = self.mapping
        return len(held) == len(self.keys) and all(map(is_, held, self.keys)) and all(map(is_, held.values(), self.values))


class ChangeWatch:
    """The result of one walk. `possible` is False if it found something whose changes only a new walk can detect."""

    def __init__(self) -> None:
        self.possible = True
        self._seen: list[_Seen] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._modules = _Modules()
        self._optimizers: list[tuple[object, tuple[torch.optim.Optimizer, ...]]] = []
        self._shards: list[ShardedOptimizer] = []
        self._parts: list[tuple[Callable[[], Any], tuple[Any, ...]]] = []
        self._names: list[tuple[Callable[[], list[str | None]], list[str | None]]] = []
        self._held: list[tuple[Mapping[str, Any], str, object]] = []  # holders of containers: mapping, key, container
        self._transient: list[tuple[nn.Module, frozenset[str]]] = []  # modules, and their buffers that are not saved
        self._hooked: list[tuple[nn.Module, str]] = []
        self._sharded: list[tuple[Any, torch.Tensor, object]] = []
        self._fragments: list[tuple[Fragment, tuple[Any, ...]]] = []
        self._wrappers: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self._forms = _Forms(())

    def unchanged(self) -> bool:
        """Whether a new walk would find the identical tensors at the same places."""
        if not self.possible:
            return False
        for module, prefix in self._hooked:  # FSDP2 puts its parameters back to their shards here
            for hook in module._state_dict_pre_hooks.values():
                hook(module, prefix, True)
        return (
            self._modules.unchanged
            and all(
                len(optimizers := optimizer_wrappers.find(value).optimizers) == len(before)
                and all(map(is_, optimizers, before))
                for value, before in self._optimizers
            )
            and all(names() == before for names, before in self._names)
            and all(_gives(shards, parts) for shards, parts in self._parts)
            and all(optimizer.unchanged() for optimizer in self._shards)
            and all(holder.get(key) is held for holder, key, held in self._held)
            and all(seen.unchanged for seen in self._seen)
            and all(len(held) == len(before) and all(map(is_, held, before)) for held, before in self._lists)
            and all(module._non_persistent_buffers_set == names for module, names in self._transient)
            and all(tensor._local_tensor is local and tensor._spec is spec for tensor, local, spec in self._sharded)
            and all(all(map(is_, _place(fragment), before)) for fragment, before in self._fragments)
            and all(all(map(is_, _inside(wrapper), before)) for wrapper, before in self._wrappers)
            and self._forms.unchanged
        )

    def record(self, mapping: Mapping[Any, Any]) -> None:
        """Record a container and its present contents."""
        self._seen.append(_Seen(mapping, tuple(mapping), tuple(mapping.values())))

    def see_module(self, module: nn.Module) -> None:
        """Record everything that determines a module's `state_dict`."""
        while (inner := module.module if isinstance(module, AveragedModel) else wrapped(module)) is not None:
            self._modules.see(module)  # a wrapper: note its module and its counters
            for mapping in (module._modules, module._buffers):
                self.record(mapping)
            module = inner
        for prefix, part in module.named_modules(remove_duplicate=False):
            if not _is_plain(part):
                self.possible = False
                return
            self._modules.see(part)
            for container in _CONTAINERS:
                self.record(vars(part)[container])
            if part._buffers:
                self._transient.append((part, frozenset(part._non_persistent_buffers_set)))
            if part._state_dict_pre_hooks:
                self._hooked.append((part, f"{prefix}." if prefix else ""))

    def see_optimizers(self, value: object) -> None:
        """Record the optimizers of an entry, their parameters, and the state of each."""
        optimizers = optimizer_wrappers.find(value).optimizers
        self._optimizers.append((value, optimizers))
        for optimizer in optimizers:
            for name in ("state", "param_groups"):  # load_state_dict replaces them
                if name in vars(optimizer):
                    self._held.append((vars(optimizer), name, vars(optimizer)[name]))
                else:  # a property of some class
                    self.possible = False
            self.record(optimizer.state)
            for kept in optimizer.state.values():
                self.record(kept)
                held = [held_by(value) for value in kept.values()]
                self._wrappers += [(one, _inside(one)) for one in held if is_wrapped(one)]
            self._lists.append((optimizer.param_groups, tuple(optimizer.param_groups)))
            for group in optimizer.param_groups:
                self._held.append((group, "params", group["params"]))
                self._lists.append((group["params"], tuple(group["params"])))

    def see_named(self, named: Named, path: str) -> None:
        """Record the modules' own names, and the parts that replace their tensors."""
        if named.asks:
            own = named.own_names(path)
            self._names.append((partial(named.stored_names, path, own), named.stored_names(path, own)))
        for name, value, shards in named.sharded(path):
            given = shards(name, value)
            parts = tuple(given) if isinstance(given, list | tuple) else (given,)
            self._parts.append((partial(shards, name, value), parts))

    def see_shards(self, optimizer: ShardedOptimizer) -> None:
        """Record an optimizer's state by name."""
        self._shards.append(optimizer)

    def see_memory(self, tensors: Iterable[Storable], views: Iterable[Storable]) -> None:
        """Record the memory and form of tensors, and the parts of `views`, whose adapters make other objects of another
        memory or form. Call it once, with all of them.
        """
        self._forms = _Forms(self._local(tensors))
        self._local(views)

    def _local(self, tensors: Iterable[Storable]) -> list[torch.Tensor]:
        """What this rank has of these tensors; the parts are recorded."""
        memory: list[torch.Tensor] = []
        values = list(tensors)
        for value in values:
            if isinstance(value, FragmentList) and isinstance(value.given, list):
                self._lists.append((value.given, value.parts))
        for part in (part for value in values for part in parts_of(value)):
            if isinstance(part, Fragment):
                self._fragments.append((part, _place(part)))
                memory.append(part.tensor)
            elif is_dtensor(part):
                local = part._local_tensor  # type: ignore[attr-defined]
                self._sharded.append((part, local, part._spec))  # type: ignore[attr-defined]
                memory.append(local)
            else:
                memory.append(part)
        return memory


def _inside(wrapper: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in a wrapper tensor, which its class may replace."""
    return tuple(inner_tensors(wrapper, "the optimizer").values())


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's `state_dict` contains just its containers. TorchScript's are not dicts that can be compared."""
    held = vars(module)
    return (
        all(isinstance(held.get(container), dict) for container in _CONTAINERS)
        and not module._state_dict_hooks
        and not any(_is_special(module, method) for method in _PLAIN_METHODS)
    )


def _is_special(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


def _place(fragment: Fragment) -> tuple[Any, ...]:
    return fragment.tensor, fragment.held, fragment.shape, fragment.offset, fragment.box, fragment.flat


def _gives(shards: Callable[[], Any], parts: tuple[Any, ...]) -> bool:
    given = shards()
    now = given if isinstance(given, list | tuple) else (given,)
    return len(now) == len(parts) and all(map(is_, now, parts))


class _Modules:
    """Modules and the containers that each of them had; these can be replaced too."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._attributes: list[dict[str, Any]] = []
        self._containers: dict[str, list[Any]] = {name: [] for name in _CONTAINERS}

    def see(self, module: nn.Module) -> None:
        self._modules.append(module)
        self._classes.append(type(module))
        self._attributes.append(vars(module))
        for name, held in self._containers.items():
            held.append(vars(module)[name])

    @property
    def unchanged(self) -> bool:
        return (
            all(map(is_, map(type, self._modules), self._classes))
            and all(all(map(is_, map(itemgetter(name), self._attributes), held)) for name, held in self._containers.items())
            and not any(method in held for method in _PLAIN_METHODS for held in self._attributes)
        )


class _Forms:
    """The memory and form of tensors. Strides are compared only if they do not follow from the shape."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._contiguous = [tensor.is_contiguous() for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._strided = [(tensor, tensor.stride()) for tensor in tensors if not tensor.is_contiguous()]
        self._complex = [tensor for tensor in tensors if tensor.is_complex()]

    @property
    def unchanged(self) -> bool:
        tensors = self._tensors
        try:
            return (
                [tensor.data_ptr() for tensor in tensors] == self._addresses
                and [tensor.dtype for tensor in tensors] == self._dtypes
                and [tensor.is_contiguous() for tensor in tensors] == self._contiguous
                # One at a time: a list of as many new tuples would trigger Python's garbage collection.
                and all(map(eq, (tensor.shape for tensor in tensors), self._shapes))
                and all(tensor.stride() == stride for tensor, stride in self._strided)
                and not any(tensor.is_neg() for tensor in tensors)
                and not any(tensor.is_conj() for tensor in self._complex)
            )
        except (RuntimeError, NotImplementedError):
            return False  # one has no memory any more: the walk names it
