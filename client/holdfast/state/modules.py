"""Collects the tensors of modules and mappings by the model's own names; tied tensors are collected once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.left_out import LeftOutNote
from holdfast.state import fsdp1
from holdfast.tensors import trees
from holdfast.tensors.fragments import (
    Fragment,
    FragmentList,
    Storable,
    fragment_list,
    local_tensor,
    local_tensors,
    objects,
    parts_of,
)
from holdfast.tensors.leaves import RANK_PREFIX, Content, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.torch_dtypes import has_memory
from holdfast_formats.errors import InvalidRequest

MODEL, EMA = "model", "ema"  # groups
EXTRA_STATE = "_extra_state"
# Wrappers put these into the names of a module that they wrap in place; they are not part of the model's own names.
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_WRAPPER_CLASSES = ("DistributedDataParallel", "DataParallel")


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside DDP, torch.compile or activation checkpointing; None for any other module."""
    kind = type(module).__name__
    if kind in _WRAPPER_CLASSES:
        inner = module.module
    elif kind == "OptimizedModule":
        inner = module._orig_mod
    elif kind == "CheckpointWrapper":
        inner = module._checkpoint_wrapped_module
    else:
        return None
    assert isinstance(inner, nn.Module)
    return inner


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside all of its wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def clean(name: str) -> str:
    """A tensor's name without the parts that wrappers inside the model added."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class ModuleState(NamedTuple):
    """The live tensors of a module, and its submodules with a value of their own, both by clean name.

    Call `release` after tensors were restored. `unsaved` are names that the module recomputes itself, and that a save leaves
    out.
    """

    tensors: dict[str, Storable]
    extras: dict[str, tuple[nn.Module, Any]]
    release: tuple[Callable[[], None], ...] = ()
    unsaved: frozenset[str] = frozenset()


def module_state(module: nn.Module, path: str) -> ModuleState:
    """Every persistent tensor of the module, live: parameters, buffers, and those from `get_extra_state`."""
    _refuse_cycles(module, path, ())
    if isinstance(module, AveragedModel):
        inner = module_state(module.module, path)
        if "n_averaged" in inner.tensors:
            raise InvalidRequest(
                f"{path}: the averaged model has its own tensor named 'n_averaged'", hint="rename that tensor in the model"
            )
        return inner._replace(tensors={**inner.tensors, "n_averaged": module.n_averaged})
    module = unwrap(module)
    if fsdp1.is_flat(module):
        flat_state = fsdp1.flat_state(module, path)
        cleaned = {clean(name): value for name, value in flat_state.tensors.items()}
        values = {clean(name): value for name, value in flat_state.extras.items()}
        return ModuleState(cleaned, values, flat_state.release, _made_by_itself(module, cleaned))
    owners = {clean(_below(name, EXTRA_STATE)): child for name, child in module.named_modules(remove_duplicate=False)}
    tensors: dict[str, Storable] = {}
    extras: dict[str, tuple[nn.Module, Any]] = {}
    given = module.state_dict(keep_vars=True)
    _refuse_temporaries(module, {raw: value for raw, value in given.items() if not _is_extra(raw)}, path)
    for raw, value in given.items():
        name = clean(raw)
        if name in tensors or name in extras:
            raise InvalidRequest(
                f"{path}: two tensors have the name {name!r} once wrapper prefixes are removed",
                hint="rename one of the two modules",
            )
        if name in owners and _is_extra(raw):
            extras[name] = owners[name], value  # the module is given it in set_extra_state: it may be made on each call
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            raise InvalidRequest(
                f"{path}.{name}: state_dict() returns a {type(value).__name__}, not a tensor",
                hint="return tensors from it, and other values from get_extra_state()",
            )
    return ModuleState(tensors, extras, unsaved=_made_by_itself(module, tensors))


def _made_by_itself(module: nn.Module, tensors: Mapping[str, Storable]) -> frozenset[str]:
    """The names in `_keys_to_ignore_on_save` of a transformers model, except trained and tied tensors."""
    try:
        named: object = getattr(module, "_keys_to_ignore_on_save", None)
    except Exception:  # a module's own __getattr__ may raise anything
        named = None
    if not isinstance(named, list | tuple | set | frozenset):
        return frozenset()
    self_referring = frozenset(
        name for name in named if isinstance(name, str) and name in tensors and not is_trained(tensors[name])
    )
    aliases = tied(tensors) if self_referring else {}
    return self_referring - aliases.keys() - set(aliases.values())


def is_trained(value: Storable) -> bool:
    """Whether a tensor, or the parameter of which Fragments are parts, requires a gradient."""
    return any((part.held if isinstance(part, Fragment) else part).requires_grad for part in parts_of(value))


def mapping_state(value: Mapping[str, Any], path: str) -> ModuleState:
    return ModuleState({name: fragment_list(item, f"{path}.{name}") or item for name, item in value.items()}, {})


def is_tensor(value: object) -> bool:
    """Whether an object is one tensor of the state: a tensor, a Fragment, or a list or tuple of Fragments only."""
    if type(value) in (list, tuple):
        return bool(value) and all(isinstance(part, Fragment) for part in value)  # type: ignore[attr-defined]
    return isinstance(value, torch.Tensor | Fragment)


def is_tensors(value: object) -> bool:
    """Whether an object is a mapping of names to tensors, with at least one."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and name and is_tensor(tensor) for name, tensor in value.items())
    )


def refuse_empty_lists(path: str, value: object, only_tensors: bool) -> None:
    """Refuse empty lists that can only mean Fragments: among tensors alone, with a list of Fragments.

    `only_tensors`: the mapping has no place for anything else, so that it needs no such list.
    """
    if not isinstance(value, Mapping):
        return
    lists = {name: item for name, item in value.items() if type(item) in (list, tuple)}
    empty = [name for name, item in lists.items() if not item]
    others = [item for name, item in value.items() if name not in empty]
    if empty and all(map(is_tensor, others)) and (only_tensors or len(empty) < len(lists)):
        raise InvalidRequest(
            f"{path}.{empty[0]}: an empty list does not say which tensor this rank has no part of",
            hint="if it has none, list an empty Fragment: Fragment(torch.empty(0, dtype=…), shape, flat=(0, 0))",
        )


def _set_extra(owner: nn.Module, live: Any, value: Any) -> None:
    """Set a module's own value in its present form: tensors on its device, and bytes that another program wrote as a
    stream.
    """
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
        value = value.to(live.device)
    elif isinstance(live, io.BytesIO) and isinstance(value, bytes):
        value = io.BytesIO(value)
    owner.set_extra_state(value)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _refuse_cycles(module: nn.Module, path: str, above: tuple[int, ...]) -> None:
    """Refuse a module that contains itself: torch would recurse endlessly."""
    if id(module) in above:
        raise InvalidRequest(f"{path} contains itself", hint="keep the reference out of the module's children: in a list")
    for name, child in module.named_children():
        _refuse_cycles(child, f"{path}.{name}", (*above, id(module)))


def _refuse_temporaries(module: nn.Module, values: Mapping[str, Any], path: str) -> None:
    """Refuse tensors that the module created for its `state_dict`: restored values would not reach it."""
    own = {id(value) for value in (*module.parameters(), *module.buffers())}
    foreign = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and id(value) not in own}
    if not foreign:
        return
    held = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    memory = {_storage(value) for value in (*module.parameters(), *module.buffers(), *held)}
    for name, value in foreign.items():
        if has_memory(local := local_tensor(value)) and local.numel() and _storage(value) not in memory:
            raise InvalidRequest(
                f"{path}.{name}: state_dict() creates this tensor on each call; it shares no memory with a "
                "parameter, buffer or attribute, so a restore into it would be lost",
                hint="use register_buffer, or wrap the module in an object that is not an nn.Module and has the "
                "same state_dict and load_state_dict; Holdfast then calls these",
            )


def _storage(value: torch.Tensor) -> int:
    local = local_tensor(value)
    return local.untyped_storage().data_ptr() if has_memory(local) else 0


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parameter_names(tensors: Mapping[str, Storable], prefix: str = "") -> dict[int, tuple[str, Storable]]:
    """Parameter names by the identity of the objects that an optimizer may hold for each. The first name counts."""
    named: dict[int, tuple[str, Storable]] = {}
    for name, value in tensors.items():
        for part in parts_of(value):
            named.setdefault(id(part.held if isinstance(part, Fragment) else part), (prefix + name, value))
    return named


def inner_names(name: str) -> Iterator[str]:
    """The name, and its suffixes without the names of surrounding modules, as in `module.weight`."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def tied(tensors: Mapping[str, Storable]) -> dict[str, str]:
    """Alias -> first name, for tensors that are the same elements of the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    fragments: dict[frozenset[int], str] = {}
    for name, value in tensors.items():
        declared = isinstance(value, Fragment | FragmentList)
        if declared and fragments.setdefault(same := frozenset(objects(value)), name) != name:
            aliases[name] = fragments[same]  # also if this rank's part of both is empty
            continue
        memory = local_tensors(value)
        if not all(map(has_memory, memory)) or not any(local.numel() for local in memory):
            continue  # the first one is refused by name when the leaf is made
        places = tuple(map(_memory_place, memory))
        # Shards that share memory by chance are the same tensor only if they are the same part of it.
        part = value.boxes if isinstance(value, Fragment | FragmentList) else str(getattr(value, "placements", ""))
        canonical = first.setdefault((places, tuple(value.shape), part), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def _memory_place(local: torch.Tensor) -> tuple[object, ...]:
    storage = local.untyped_storage().data_ptr()
    return local.device, storage, local.storage_offset(), local.shape, local.stride(), local.dtype


class NamedTensors(NamedTuple):
    """The named tensors of a module or plain mapping, which form a group, or share a prefix in one."""

    group: str
    path: str
    state: ModuleState
    prefix: str
    rank: int

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({self.group})

    def tensors(self) -> Iterator[Storable]:
        return iter(self.state.tensors.values())

    def collect(self, content: Content) -> None:
        """Add the live tensors, each memory once, and the modules' own values."""
        aliases = tied(self.state.tensors)
        for name, value in self.state.tensors.items():
            if name not in aliases and name not in self.state.unsaved:
                content.add(self.group, self._stored_name(name), value)
        for alias, canonical in aliases.items():
            content.aliases.setdefault(self.group, {})[self._stored_name(alias)] = self._stored_name(canonical)
        for name, (_, value) in self.state.extras.items():
            tree = self._tree(name, value)
            content.add_value(self.group, name, tree.text)
            for tensor_name, tensor in tree.tensors.items():
                content.add(self.group, tensor_name, tensor)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want every selected live tensor, and every module's own value."""
        plan = PartPlan()
        aliases = tied(self.state.tensors)
        for name, value in self.state.tensors.items():
            stored_name = self._stored_name(name)
            left_out = name in self.state.unsaved and stored.canonical(self.group, stored_name) is None
            if name in aliases or not selection.takes(self.group, stored_name):
                continue
            if left_out:
                text = (
                    f"{self.group}/{stored_name} is not in the checkpoint, because the module lists it in "
                    "_keys_to_ignore_on_save"
                )
                plan.notes.append(LeftOutNote(text))
            else:
                plan.want(self.group, stored_name, value)
        plan.actions += self.state.release
        names = {self._stored_name(alias): self._stored_name(canonical) for alias, canonical in aliases.items()}
        plan.aliases[self.group] = {a: c for a, c in names.items() if selection.takes(self.group, a)}
        for name, (owner, live) in self.state.extras.items():
            if selection.takes(self.group, name):
                self._plan_extra(plan, stored, name, partial(_set_extra, owner, live))
        return plan

    def left_out(self) -> list[str]:
        """Names that a save leaves out on the module's wish."""
        if not self.state.unsaved:
            return []
        return [f"{self.group}/{self._stored_name(name)}" for name in self.state.tensors if name in self.state.unsaved]

    def still_left_out(self) -> bool:
        """Whether those are still untrained."""
        return not any(is_trained(self.state.tensors[name]) for name in self.state.unsaved)

    def _plan_extra(self, plan: PartPlan, stored: OfferedLeaves, name: str, install: Callable[[Any], None]) -> None:
        plan.documents.append((self.group, name))
        text = stored.value(self.group, name)
        if text is None:
            return
        regrown = trees.regrow(text, f"{self.path}.{name}", partial(stored.spec, self.group), {})
        plan.missing += [f"{self.group}/{unknown}" for unknown in regrown.unknown]
        for tensor_name, tensor in regrown.tensors.items():
            plan.want(self.group, tensor_name, tensor)
        plan.actions.append(lambda: install(regrown.build()))

    def _tree(self, name: str, value: Any) -> trees.Tree:
        return trees.grow(value, f"{self.path}.{name}", name, f"{RANK_PREFIX}{self.rank:05d}/{name}")

    def _stored_name(self, name: str) -> str:
        if name.startswith(RANK_PREFIX) and not self.prefix:
            raise InvalidRequest(
                f"{self.path}: tensor names that begin with {RANK_PREFIX!r} are reserved",
                hint="rename the tensor in the module",
            )
        return self.prefix + name
