"""Finds plain numbers that modules of the user's classes keep as attributes, and that training changes."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch


class ModuleNumbers:
    """Numbers that modules of the user's classes keep as attributes. torch's own have none that training changes, and what
    has a get_extra_state() decides itself what is stored.

    All are compared at the first few saves, and later some at each save, in turn, so that a save of very many modules costs
    nothing for it.
    """

    AT_ONCE, WHOLE = 256, 4

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._looks: list[tuple[str, object, dict[str, Any], tuple[str, ...], tuple[object, ...]]] = []
        self._changed: dict[str, tuple[dict[str, Any], str]] = {}
        self._next = self._times = 0

    def see(self, path: str, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Take a first look at modules that are new."""
        for name, module in modules:
            if id(module) in self._known:
                continue
            self._known.add(id(module))
            held = vars(module)
            names = tuple(key for key, value in held.items() if type(value) in (int, float))
            if names and not type(module).__module__.startswith("torch.") and not _keeps_its_own(module):
                own = f"{path}.{name}" if name else path
                self._looks.append((own, module, held, names, tuple(map(held.__getitem__, names))))

    def changed(self) -> dict[str, Any]:
        """The values of those that were seen to change, by path."""
        count = len(self._looks)
        self._times += 1
        for _ in range(count if self._times <= self.WHOLE else min(self.AT_ONCE, count)):
            path, _, held, names, before = self._looks[self._next % count]
            self._next = (self._next + 1) % count
            now = tuple(map(held.get, names))
            if not all(map(is_, now, before)):
                for name, old, new in zip(names, before, now, strict=True):
                    if type(new) is type(old) and new != old:
                        self._changed.setdefault(f"{path}.{name}", (held, name))
        return {path: held[name] for path, (held, name) in self._changed.items() if type(held.get(name)) in (int, float)}


def _keeps_its_own(module: torch.nn.Module) -> bool:
    return "get_extra_state" in vars(module) or type(module).get_extra_state is not torch.nn.Module.get_extra_state
