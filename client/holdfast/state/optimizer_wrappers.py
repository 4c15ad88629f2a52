"""Finds torch's optimizers inside the wrappers of frameworks, and state of the wrappers themselves.

accelerate, torchtitan, Megatron, apex and Lightning return an object with `param_groups` whose steps are those of one or
more torch optimizers inside. The innermost ones hold the trained state: they are saved, restored, watched and waited for.
All code that needs the optimizers of a state uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.state.masters import is_copy, is_varied
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.tensors.fragments import Fragment, OneTensor, Storable, local_tensor, parts_of
from holdfast_formats.errors import InvalidRequest

NESTED_MAX = 4  # lists in lists in which optimizers, or tensors of a wrapper's attributes, are looked for
COMPARED_MAX = 8  # tensors of an optimizer's attribute that are compared with its parameters
_PROPERTIES = ("optimizer", "optimizers", "chained_optimizers")  # also if they are not plain attributes
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
_NO_OPTIMIZERS = (nn.Module, torch.Tensor, Fragment, str, bytes, int, float, type(None))


class FoundOptimizers(NamedTuple):
    """The optimizers that step, in a fixed order, and the wrappers that only delegate the step."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    wrappers: tuple[Any, ...]


def is_optimizer(value: object, depth: int = 0) -> bool:
    """Whether an entry of the state is an optimizer, an object that looks like one, or a collection of only these."""
    if isinstance(value, torch.optim.Optimizer | OptimizerShards):
        return True
    if isinstance(value, _NO_OPTIMIZERS):
        return False
    if isinstance(value, list | tuple | Mapping):
        items = value.values() if isinstance(value, Mapping) else value
        return bool(value) and depth < NESTED_MAX and all(is_optimizer(item, depth + 1) for item in items)
    groups = _attribute(value, "param_groups")  # a list, since some objects have something under every name
    return isinstance(groups, list | tuple) and callable(_attribute(value, "step"))


def find(value: object) -> FoundOptimizers:
    """The innermost optimizers of an entry for which `is_optimizer` holds; empty if there is no torch optimizer inside.
    Those of an `OptimizerShards` are its hooks.
    """
    if isinstance(value, OptimizerShards):
        return FoundOptimizers(value.hooks, ())
    optimizers: dict[int, torch.optim.Optimizer] = {}
    wrappers: dict[int, Any] = {}
    _gather(value, optimizers, wrappers)
    return FoundOptimizers(tuple(optimizers.values()), tuple(wrappers.values()))


def innermost(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """All optimizers of a state whose steps change it."""
    by_id = {id(inner): inner for value in state.values() if is_optimizer(value) for inner in find(value).optimizers}
    return list(by_id.values())


def check(key: str, value: object, state: Mapping[str, Any], known: Iterable[Storable]) -> FoundOptimizers:
    """The innermost optimizers of an entry. Refuse an entry without any, and a wrapper with state that would be lost.
    `known` are tensors that are stored anyway.
    """
    located = find(value)
    if not located.optimizers:
        raise InvalidRequest(
            f"{key}: {type(value).__name__} has param_groups, but is not a torch optimizer and does not wrap one",
            hint="pass the torch.optim.Optimizer that takes the steps, or an object with only state_dict() and "
            "load_state_dict() that passes both on to it",
        )
    for optimizer in located.optimizers:
        _refuse_more(key, optimizer)
    holding = [optimizer for optimizer in located.optimizers if any(_attribute_tensors(optimizer))]
    if located.wrappers or holding:
        inner = {id(kept) for optimizer in located.optimizers for kept in optimizer.state.values()}
        stored = (part for value in known for part in parts_of(value))
        memory = {address(tensor) for tensor in (*stored, *_tensors_of(located.optimizers))}
        for optimizer in holding:
            _refuse_copies(key, optimizer, memory)
        for wrapper in located.wrappers:
            _refuse_own(key, wrapper, (inner, memory), state)
    return located


def _attribute_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The first tensors of each attribute of an optimizer itself, by the attribute's name."""
    for name, item in vars(optimizer).items():
        if name not in _OF_EVERY_OPTIMIZER:
            attributes = (tensor for tensor in _tensors(item) if tensor.numel() > 1)
            yield from ((name, tensor) for tensor in islice(attributes, COMPARED_MAX))


def _refuse_copies(key: str, optimizer: torch.optim.Optimizer, memory: set[int]) -> None:
    """Refuse full-precision copies in an attribute, as in apex's FusedAdam: `state_dict()` lacks them, and after a restore
    the next step would use the old ones.
    """
    for name, tensor in _attribute_tensors(optimizer):
        if address(tensor) in memory:
            continue
        for parameter in _parameters(optimizer):
            weight, copy = local_tensor(parameter), local_tensor(tensor)
            if is_copy(copy, weight) and is_varied(weight):
                raise InvalidRequest(
                    f"{key}: the {type(optimizer).__name__} has full-precision copies of its parameters in {name}, which "
                    "would not be saved",
                    hint="add them to the state as 'master', a mapping of tensors by parameter name",
                )


def _refuse_more(key: str, optimizer: torch.optim.Optimizer) -> None:
    """`InvalidRequest` for values that a class or a hook adds to `state_dict()`: they would not be stored."""
    plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(optimizer)
    if plain and not getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        return
    more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
    if more:
        raise InvalidRequest(
            f"{key}: state_dict() of the {type(optimizer).__name__} has {', '.join(more)} in addition to state and "
            "param_groups, which would not be saved",
            hint="put it into an object with state_dict() and load_state_dict(), and give that object its own key "
            "in the state",
        )


def _gather(value: object, optimizers: dict[int, torch.optim.Optimizer], wrappers: dict[int, Any]) -> None:
    if isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            _gather(item, optimizers, wrappers)
        return
    if isinstance(value, OptimizerShards):
        raise InvalidRequest("OptimizerShards is inside another object", hint="give it its own key in the state")
    if id(value) in optimizers or id(value) in wrappers:
        return
    inside = list(_held(value))
    if not inside:
        if isinstance(value, torch.optim.Optimizer):
            optimizers[id(value)] = value
        return
    wrappers[id(value)] = value  # met already, in case it is inside an object that it holds
    for held in inside:
        _gather(held, optimizers, wrappers)
    theirs = {id(p) for optimizer in optimizers.values() for p in _parameters(optimizer)}
    if isinstance(value, torch.optim.Optimizer) and any(id(p) not in theirs for p in _parameters(value)):
        del wrappers[id(value)]  # it steps parameters of its own, and others help it
        optimizers[id(value)] = value


def _held(value: object) -> Iterator[object]:
    attributes = dict(getattr(value, "__dict__", {}))
    attributes.update((name, _attribute(value, name)) for name in _PROPERTIES if name not in attributes)
    for name, item in attributes.items():
        if item is not None and item is not value and name not in _OF_EVERY_OPTIMIZER and is_optimizer(item):
            yield item


def _attribute(value: object, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # a property of another class that is not ready yet may raise anything
        return None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in _attribute(optimizer, "param_groups") or () for parameter in group["params"])


def _refuse_own(key: str, wrapper: Any, known: tuple[set[int], set[int]], state: Mapping[str, Any]) -> None:
    """Refuse a wrapper's own state, because it would not be in the checkpoint."""
    inner, memory = known
    where, what = f"{key}: the {type(wrapper).__name__} around the optimizer", ""
    own = _attribute(wrapper, "state")
    if hasattr(own, "items") and any(kept and id(kept) not in inner for _, kept in own.items()):
        what = "has its own state for its parameters"
    for name, item in getattr(wrapper, "__dict__", {}).items():
        if name in _OF_EVERY_OPTIMIZER or what:
            continue
        if _is_lost(item, state):
            what = f"has {name}, a {type(item).__name__} whose state would not be saved"
        elif any(tensor.numel() > 1 and address(tensor) not in memory for tensor in _tensors(item)):
            what = f"has its own tensors in {name}, which would not be saved"
    if what:
        raise InvalidRequest(
            f"{where} {what}",
            hint="add it to the state (full-precision copies as 'master', by parameter name; a scaler or scheduler "
            "under its own key), or, if it need not be saved, pass the optimizer inside",
        )


def _is_lost(item: object, state: Mapping[str, Any]) -> bool:
    """Whether this is an object with a state that no entry of the state stores."""
    stateful = callable(_attribute(item, "state_dict")) and callable(_attribute(item, "load_state_dict"))
    if not stateful or isinstance(item, nn.Module | type) or is_optimizer(item):
        return False
    return all(item is not value for value in state.values()) and bool(item.state_dict())  # type: ignore[attr-defined]


def _tensors(item: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, list | tuple | Mapping) and depth < NESTED_MAX:
        for inner in item.values() if isinstance(item, Mapping) else item:
            yield from _tensors(inner, depth + 1)


def _tensors_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        yield from _parameters(optimizer)
        for kept in optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def address(tensor: OneTensor) -> int:
    """The address of the memory behind a tensor; 0 for a tensor without memory."""
    try:
        return local_tensor(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
