"""Modules under other names: several as one group, a part of their tensors only, or names that another program expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.layout.model_form import ModelForm
from holdfast.state.modules import ModuleState, module_state
from holdfast.tensors.fragments import Fragment, FragmentList, Storable, fragment_list, same_memory
from holdfast_formats.errors import InvalidRequest

LISTED_MAX = 5  # names in an error's text

Rename = Callable[[str], str] | Mapping[str, str]
Only = Callable[[str], object] | Sequence[str | re.Pattern[str]]
Shards = Callable[[str, Any], Any]


class Named:
    """An entry of the state: one module, or several, as one group whose name is the entry's key.

    Tensor names are those that the modules would have without `Named`. Parameters stay the same objects: an optimizer
    in the state that steps them is stored under the stored names, and one that steps an excluded parameter is refused.

    Args:
        objects: The module or modules.
        rename: Maps a tensor's own name to the stored one: a function, or a mapping; names missing in it stay.
        only: Selects tensors by their own names: a function, or patterns, of which one must match the whole name: text as
            in `fnmatch`, or compiled regular expressions. The others are neither saved nor restored.
        shards: `shards(name, tensor)` returns Fragments of a partition that the framework keeps, or the tensor itself, and
            never a copy, because a restore writes into it.
        form: How an adapter stores the model. A Checkpointer takes layout and assets from it.
        views: Whether the modules are an adapter's, with views of another framework's tensors: of another memory or form, a
            tensor is another object, so a save need not look at either.

    Raises:
        InvalidRequest: For anything but modules, and for a `rename`, `only` or `shards` of another type.

    Example:
        >>> state = {"model": Named(model, rename=lambda name: name.removeprefix("_orig_mod."))}
    """

    def __init__(
        self,
        objects: nn.Module | Sequence[nn.Module],
        rename: Rename | None = None,
        only: Only | None = None,
        shards: Shards | None = None,
        form: ModelForm | None = None,
        views: bool = False,
    ) -> None:
        if shards is not None and not callable(shards):
            raise InvalidRequest(
                f"shards= of Named must be a function, not a {type(shards).__name__}",
                hint="pass a function of a name and a tensor, or leave shards= out",
            )
        self._shards, self.form, self.views = shards, form, views
        self._kept_for_good: set[str] = set()  # names for which `shards` was seen to return the same memory twice
        self.modules = _modules(objects)
        self._rename = _check_rename(rename)
        self._only = _check_only(only)
        self._by_function = callable(only)

    def state(self, path: str) -> ModuleState:
        """The live tensors of all modules, and values of their own, by stored name; `path` is the entry's key.

        Raises `InvalidRequest` for two different tensors with one stored name, for an invalid stored name, for keys of
        `rename` that name nothing, and if `only` selects nothing.
        """
        states = [module_state(module, path) for module in self.modules]
        self._check_keys(path, states)
        merged = _Merged(path)
        for one in states:
            for name in filter(self._keeps, one.tensors):
                merged.add_tensor(name, self._stored(path, name), self._shard(path, name, one.tensors[name]))
            for name in filter(self._keeps, one.extras):
                merged.add_value(name, self._stored(path, name), *one.extras[name])
        if not merged.tensors and not merged.values and any(one.tensors or one.extras for one in states):
            examples = _listed([name for one in states for name in one.tensors])
            raise InvalidRequest(
                f"{path}: only= of Named keeps none of the names of its modules ({examples})",
                hint="patterns match the whole name: write '*lora_*' rather than 'lora_'",
            )
        unsaved = frozenset(self._stored(path, name) for one in states for name in one.unsaved if self._keeps(name))
        release = tuple(action for one in states for action in one.release)
        return ModuleState(merged.tensors, merged.values, release, unsaved)

    def left_out(self, path: str) -> Iterator[tuple[str, Storable]]:
        """The tensors that `only` leaves out, by their own names."""
        for module in self.modules:
            for name, value in module_state(module, path).tensors.items():
                if not self._keeps(name):
                    yield name, value

    def sharded(self, path: str) -> Iterator[tuple[str, Storable, Shards]]:
        """The arguments of every call of `shards`, and that function."""
        if self._shards is not None:
            for module in self.modules:
                for name, value in module_state(module, path).tensors.items():
                    if self._keeps(name):
                        yield name, value, self._shards

    def own_names(self, path: str) -> list[str]:
        """The names of all tensors of the modules, stored or not."""
        states = [module_state(module, path) for module in self.modules]
        return [name for one in states for name in (*one.tensors, *one.extras)]

    def stored_names(self, path: str, own: Iterable[str]) -> list[str | None]:
        """The stored names of these names now, None for excluded ones."""
        return [self._stored(path, name) if self._keeps(name) else None for name in own]

    @property
    def asks(self) -> bool:
        """Whether functions decide about names; their results may change."""
        return callable(self._rename) or self._by_function

    def _shard(self, path: str, name: str, value: Storable) -> Storable:
        if self._shards is None:
            return value
        given = self._shards(name, value)
        tensor = fragment_list(given, f"{path}.{name}") or given
        if name not in self._kept_for_good and isinstance(tensor, torch.Tensor | Fragment | FragmentList):
            once_more = self._shards(name, value)
            again = fragment_list(once_more, f"{path}.{name}") or once_more
            if not isinstance(again, torch.Tensor | Fragment | FragmentList) or not same_memory(tensor, again):
                raise InvalidRequest(
                    f"{path}.{name}: shards= of Named returns different memory at every call, so a restore would be lost",
                    hint="return the tensors that the framework keeps, or views of them: no copies, casts or concatenations",
                )
            self._kept_for_good.add(name)
        if not isinstance(tensor, torch.Tensor | Fragment | FragmentList):
            raise InvalidRequest(
                f"{path}.{name}: shards= of Named must return a tensor, a Fragment or a list of Fragments, not a "
                f"{type(given).__name__}",
                hint="return the tensor itself, or its parts: Fragment(tensor, shape, offset=…)",
            )
        return tensor

    def _keeps(self, name: str) -> bool:
        return self._only is None or bool(self._only(name))

    def _stored(self, path: str, name: str) -> str:
        if self._rename is None:
            return name
        stored: object = self._rename.get(name, name) if isinstance(self._rename, Mapping) else self._rename(name)
        if not isinstance(stored, str) or not stored:
            raise InvalidRequest(
                f"{path}: rename= of Named makes {stored!r} of {name!r}, which is not a name",
                hint="return the stored name, as text that is not empty; use only= to leave a tensor out",
            )
        return stored

    def _check_keys(self, path: str, module_states: Sequence[ModuleState]) -> None:
        if isinstance(self._rename, Mapping):
            known = {name for one in module_states for name in (*one.tensors, *one.extras)}
            unknown = [name for name in self._rename if name not in known]
            if unknown:
                raise InvalidRequest(
                    f"{path}: rename= of Named has {_listed(unknown)}, which no module of it has",
                    hint="use the names of state_dict(), without prefixes of wrappers; a function may know more names",
                )


class _Merged:
    def __init__(self, path: str) -> None:
        self.tensors: dict[str, Storable] = {}
        self.values: dict[str, tuple[nn.Module, Any]] = {}
        self._path = path
        self._own: dict[str, str] = {}  # stored name -> the module's own

    def add_tensor(self, name: str, stored: str, value: Storable) -> None:
        before = self.tensors.get(stored)
        if stored in self.values or (before is not None and _held(before) is not _held(value)):
            raise self._twice(name, stored)
        self._own.setdefault(stored, name)
        self.tensors.setdefault(stored, value)

    def add_value(self, name: str, stored: str, owner: nn.Module, value: Any) -> None:
        if stored in self._own:
            raise self._twice(name, stored)
        self._own[stored] = name
        self.values[stored] = owner, value

    def _twice(self, name: str, stored: str) -> InvalidRequest:
        first = self._own[stored]
        which = (
            f"two modules have {name!r}, and they differ" if first == name else f"{first!r} and {name!r} are not one tensor"
        )
        return InvalidRequest(
            f"{self._path}: {which}, and Named would store both as {stored!r}",
            hint="give them different names: with rename=, in the modules, or as their own entries",
        )


def refuse_left_out(key: str, optimizers: Iterable[Optimizer], known: Container[int], state: Mapping[str, Any]) -> None:
    """Refuse an optimizer that steps an excluded parameter: its training would be lost. `known` has the identities of the
    stored tensors.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    unknown = {id(tensor) for group in groups for tensor in group["params"] if id(tensor) not in known}
    if not unknown:
        return
    entries = [(path, entry) for path, entry in state.items() if isinstance(entry, Named)]
    for path, entry in entries:
        for name, value in entry.left_out(path):
            if id(_held(value)) in unknown:
                raise InvalidRequest(
                    f"{key} steps the parameter {name!r}, which only= of Named leaves out of {path}: its training "
                    "would be lost",
                    hint="keep it with only=, or give the optimizer only the parameters that are saved",
                )


def modules_of(entry: object) -> tuple[nn.Module, ...]:
    """The modules of an entry; none if it is something else."""
    if isinstance(entry, Named):
        return entry.modules
    return (entry,) if isinstance(entry, nn.Module) else ()


def _held(value: Storable) -> object:
    return value.held if isinstance(value, Fragment) else value


def _modules(objects: object) -> tuple[nn.Module, ...]:
    if isinstance(objects, nn.Module):
        return (objects,)
    if not isinstance(objects, Sequence) or isinstance(objects, str | bytes):
        raise InvalidRequest(
            f"Named takes a module or a list of modules, not a {type(objects).__name__}",
            hint="pass modules: Named(model), or Named([part, other])",
        )
    modules = tuple(objects)
    strange = [type(one).__name__ for one in modules if not isinstance(one, nn.Module)]
    if strange or not modules:
        what = f"holds a {strange[0]}" if strange else "is empty"
        raise InvalidRequest(
            f"Named takes a module or a list of modules, and this list {what}",
            hint="pass modules: Named(model), or Named([part, other])",
        )
    if len({id(one) for one in modules}) < len(modules):
        raise InvalidRequest("Named has one module twice in its list", hint="list each module once")
    return modules


def _check_rename(rename: Rename | None) -> Rename | None:
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise InvalidRequest(
            f"rename= of Named must be a function or a mapping, not a {type(rename).__name__}",
            hint="for example rename={'old.weight': 'new.weight'}",
        )
    return dict(rename) if isinstance(rename, Mapping) else rename


def _check_only(only: Only | None) -> Callable[[str], object] | None:
    if only is None or callable(only):
        return only
    if isinstance(only, str | re.Pattern) or not isinstance(only, Sequence):
        raise InvalidRequest(
            f"only= of Named must be a function or a list of patterns, not {only!r}",
            hint="for one pattern: only=['*lora_*']",
        )
    patterns = tuple(only)
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str)):
            raise InvalidRequest(
                f"only= of Named has {pattern!r}, which is neither text nor a regular expression for text",
                hint="for example only=['*lora_*']",
            )
    return lambda name: any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else pattern.fullmatch(name) is not None


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(repr, names[:LISTED_MAX])) + (", …" if len(names) > LISTED_MAX else "")
