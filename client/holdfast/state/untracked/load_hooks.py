"""Runs user code for `load_state_dict()` of modules and optimizers, which a restore in place does not call.

Hooks that torch would call afterwards are called. An overridden `load_state_dict()` or `_load_from_state_dict()` of a module
gets the module's restored state. Code that cannot be called is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from holdfast.left_out import LeftOutNote
from holdfast.state import fsdp1, optimizer_wrappers, state_tensors
from holdfast.state.entries import module_groups
from holdfast.state.modules import unwrap
from holdfast.state.named import modules_of
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.untracked.ownership import is_framework_code, is_of_framework
from holdfast.state.untracked.unsaved import Unsaved
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import InvalidRequest

_LOAD, _LOAD_OWN = "load_state_dict", "_load_from_state_dict"


class _Written(NamedTuple):
    """User code that `load_state_dict()` runs: its name, and how it is run."""

    what: str
    run: Callable[[], object]


class LoadHooks(NamedTuple):
    """Called once the tensors of modules and optimizers are restored, as a part of the state that saves nothing."""

    state: Mapping[str, Any]
    unsaved: Unsaved

    @property
    def groups(self) -> frozenset[str]:
        return frozenset()

    def collect(self, content: Content) -> None: ...

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        plan, groups = PartPlan(), module_groups(self.state)
        written: list[_Written] = []
        for key, value in self.state.items():
            if key in groups:
                for module in modules_of(value):
                    found = list(_of_module(key, module))
                    if not found or not _is_restored(groups[key], stored, selection):
                        continue
                    if fsdp1.is_flat(module):
                        plan.notes.append(
                            _not_called(found, f"FSDP1 has sharded {key}", "call it yourself after the restore")
                        )
                    else:
                        written += found
            elif isinstance(value, OptimizerShards) or not optimizer_wrappers.is_optimizer(value):
                continue
            else:
                for optimizer in optimizer_wrappers.find(value).optimizers:
                    hooks, found = list(_hooks_of(key, optimizer)), list(_overridden(key, optimizer))
                    if not (hooks or found) or not _is_restored(state_tensors.GROUP, stored, selection):
                        continue
                    written += hooks
                    if found:
                        way = "put its other work into optimizer.register_load_state_dict_post_hook(), which is called"
                        plan.notes.append(_not_called(found, "a restore fills the optimizer's state in place", way))
        if written:
            plan.actions.append(partial(self._run, written))
        return plan

    def _run(self, written: list[_Written]) -> None:
        self.unsaved.before_refresh()
        for one in written:
            with _named(one.what):
                one.run()
        self.unsaved.refreshed()


def _of_module(path: str, root: nn.Module) -> Iterator[_Written]:
    """In torch's order. The root's own load_state_dict() runs all the rest."""
    inner = unwrap(root)
    if _is_overridden(inner, _LOAD):
        yield _Written(f"load_state_dict() of {path}", lambda: inner.load_state_dict(inner.state_dict()))
    else:
        yield from _below(path, root)


def _below(path: str, module: nn.Module) -> Iterator[_Written]:
    pre_hooks = [hook for hook in module._load_state_dict_pre_hooks.values() if not is_framework_code(hook)]
    if pre_hooks or _is_overridden(module, _LOAD_OWN):
        what = "a load_state_dict() pre-hook" if pre_hooks else "_load_from_state_dict()"
        yield _Written(f"{what} of {path}", partial(_load_own, module))
    for name, child in module._modules.items():
        if child is not None:
            yield from _below(f"{path}.{name}", child)
    for hook in module._load_state_dict_post_hooks.values():
        if not is_framework_code(hook):
            run = partial(hook, module, _IncompatibleKeys([], []))
            yield _Written(f"a load_state_dict() post-hook of {path}", run)


def _load_own(module: nn.Module) -> None:
    """Load a module's own tensors from its state, as torch's load_state_dict() does for each module."""
    state = module.state_dict()
    metadata = dict(getattr(state, "_metadata", {}).get("", {}))
    errors: list[str] = []
    module._load_from_state_dict(state, "", metadata, True, [], [], errors)
    if errors:
        raise RuntimeError("; ".join(errors))


def _hooks_of(key: str, optimizer: torch.optim.Optimizer) -> Iterator[_Written]:
    for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
        if not is_framework_code(hook):
            yield _Written(f"a load_state_dict() post-hook of {key}", partial(hook, optimizer))


def _overridden(key: str, optimizer: torch.optim.Optimizer) -> Iterator[_Written]:
    """Code in an optimizer's load_state_dict() that a restore cannot run: it would cast the state to the parameters'
    dtype.
    """
    if _is_overridden(optimizer, _LOAD):
        yield _Written(f"load_state_dict() of {key} ({type(optimizer).__name__})", lambda: None)
    for hook in getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values():
        if not is_framework_code(hook):
            yield _Written(f"a load_state_dict() pre-hook of {key}", lambda: None)


def _is_overridden(owner: object, method: str) -> bool:
    if method in vars(owner):
        return not is_framework_code(vars(owner)[method])
    defining = next((cls for cls in type(owner).__mro__ if method in vars(cls)), object)
    return defining is not object and not is_of_framework(defining)


def _is_restored(group: str, stored: OfferedLeaves, selection: Selection) -> bool:
    names = (*stored.specs.get(group, {}), *stored.values.get(group, {}))
    return any(selection.takes(group, name) for name in names)


def _not_called(written: list[_Written], why: str, way: str) -> LeftOutNote:
    return LeftOutNote(f"not called by the restore: {', '.join(one.what for one in written)}: {why}; {way}")


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InvalidRequest(
            f"{what} raised {type(error).__name__} after the tensors were restored: {error}",
            hint="a restore runs it as load_state_dict() would: fix it, or remove it, and restore again",
        ) from error
