"""Notes an optimizer that trains parameters of the state and is not in it, such as one that was constructed again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from holdfast.left_out import LeftOutNote
from holdfast.state import optimizer_wrappers
from holdfast.state.named import modules_of
from holdfast.state.untracked.ownership import is_of_framework

# Of the user's own classes too; a StatefulDataLoader is a DataLoader.
_KNOWN = (bool, int, float, str, type(None), torch.Tensor, torch.amp.GradScaler, LRScheduler, DataLoader)


class OtherOptimizers:
    """Every optimizer of torch that has taken a step since the state was given, as long as it lives."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hears = False
        self.hear()

    def hear(self) -> None:
        """Note the steps of all optimizers from now on, if the state has one of torch: one without any is saved on purpose.

        torch's hook has no reference to the state, and is removed with this object.
        """
        inner = optimizer_wrappers.innermost(self._state)
        if not self._hears and any(getattr(one, "compiled", True) for one in inner):
            self._hears, stepped = True, self._stepped
            # Else torch.compile of a step would trace into the hook.
            hook = torch.compiler.disable(lambda optimizer, *_: stepped.add(optimizer))  # type: ignore[no-untyped-call]
            weakref.finalize(self, register_optimizer_step_post_hook(hook).remove)

    def notes(self) -> Iterator[LeftOutNote]:
        """Of each optimizer that keeps something of a parameter of the state, and would be lost."""
        own = set(map(id, optimizer_wrappers.innermost(self._state)))
        others = [one for one in list(self._stepped) if id(one) not in own]
        if not others or any(map(may_hold_one, self._state.values())):
            return
        names = {
            id(parameter): f"{key}.{name}"
            for key, value in self._state.items()
            for module in modules_of(value)
            for name, parameter in module.named_parameters()
        }
        for other in others:
            items = list(other.state.items())  # another thread may step it
            kept = [names[id(one)] for one, held in items if id(one) in names and (not isinstance(held, Mapping) or held)]
            if kept:
                rest = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
                yield LeftOutNote(
                    f"not saved: what the {type(other).__name__} that steps {min(kept)}{rest} keeps, because it is not "
                    "in the state: give it to the Checkpointer too; after an optimizer is constructed again, make the "
                    "Checkpointer again"
                )


def may_hold_one(value: object) -> bool:
    """Whether an entry is an object of the user's own, which may have an optimizer in its state."""
    if modules_of(value) or optimizer_wrappers.is_optimizer(value) or isinstance(value, _KNOWN):
        return False
    return callable(getattr(type(value), "state_dict", None)) and not is_of_framework(type(value))
