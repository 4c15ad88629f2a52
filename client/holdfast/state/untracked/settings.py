"""Finds settings changed in training that no state_dict() has: requires_grad of parameters, and the mode (train() or eval())
of single submodules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import nn

_FLAG, _MODE = attrgetter("requires_grad"), itemgetter("training")


class _Root(NamedTuple):
    """A module of the state, and all inside of it, as their attributes."""

    held: Mapping[str, Any]
    paths: list[str]
    parts: list[Mapping[str, Any]]


class Settings:
    """requires_grad of parameters when they were first seen, and modes in the first step.

    The mode of a submodule is only checked while the module of the state trains: a validation changes all of them for a
    time. Programs set the modes before the first step, so earlier ones are meaningless.
    """

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}  # kept alive, so that an id stays what it was
        self._held: dict[int, Mapping[str, Any]] = {}  # as these
        self._first_flags: dict[tuple[int, str], bool] = {}
        self._flags: list[bool] = []
        self._first_modes: dict[int, bool] = {}
        self._modes: dict[int, list[bool]] = {}  # of the parts of a root, when they were last looked at
        self._roots: dict[int, _Root] = {}
        self._changed: dict[str, dict[str, object]] = {"requires_grad": {}, "modes": {}}
        self._places: list[tuple[str, int, str]] = []
        self._parameters: list[nn.Parameter] = []  # as they were in the last walk

    def look_again(self) -> None:
        """A walk begins, in which `see` is called for all modules."""
        self._roots, self._places, self._parameters, self._flags, self._modes = {}, [], [], [], {}

    def record(self, path: str, root: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.record_modes(path, vars(root), ((name, vars(module)) for name, module in modules))
        for name, module in modules:
            self._modules[id(module)] = module
            below = f"{path}.{name}" if name else path
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameters.append(parameter)
                    self._places.append((f"{below}.{key}", id(module), key))
                    self._first_flags.setdefault((id(module), key), parameter.requires_grad)

    def record_modes(self, path: str, root: Mapping[str, Any], parts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """The modes of a model, and of all parts of it by name: of each, the attributes, which have `training`."""
        found = _Root(root, [], [])
        for name, held in parts:
            if "training" in held:  # not in those of TorchScript
                found.paths.append(f"{path}.{name}" if name else path)
                found.parts.append(held)
                self._held[id(held)] = held
        if "training" in root:
            self._roots[id(root)] = found

    def stepped(self) -> None:
        """An optimizer is about to take a step, or has taken one: modes of modules that train are those of the training."""
        for root in self._roots.values():
            if root.held["training"] and id(root.held) not in self._first_modes:
                self._first_modes.update((id(held), held["training"]) for held in root.parts)
                self._first_modes[id(root.held)] = True

    def changed(self) -> Mapping[str, Mapping[str, object]]:
        """Parameters and submodules with a changed setting, and their present settings."""
        self.stepped()
        if (flags := list(map(_FLAG, self._parameters))) != self._flags:
            self._note_flags(flags)
        for root in self._roots.values():
            if root.held["training"]:
                self._note_modes(root)
        return {kind: paths for kind, paths in self._changed.items() if paths}

    def flags(self) -> dict[str, bool]:
        return {path: one.requires_grad for (path, _, _), one in zip(self._places, self._parameters, strict=True)}

    def _note_flags(self, flags: list[bool]) -> None:
        self._flags = flags
        for (path, owner, key), flag in zip(self._places, flags, strict=True):
            if path in self._changed["requires_grad"] or self._first_flags[owner, key] is not flag:
                self._changed["requires_grad"][path] = flag

    def _note_modes(self, root: _Root) -> None:
        """Of a submodule that is switched as a whole, only it is named."""
        modes = list(map(_MODE, root.parts))
        if self._modes.get(id(root.held)) == modes:
            return
        self._modes[id(root.held)] = modes
        prefixes, known = tuple[str, ...](), self._changed["modes"]
        for path, held, mode in zip(root.paths, root.parts, modes, strict=True):
            if path in known or self._first_modes.setdefault(id(held), mode) is not mode:
                if not path.startswith(prefixes) or path in known:
                    known[path] = mode
                prefixes = (*prefixes, f"{path}.")
