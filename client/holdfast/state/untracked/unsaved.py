"""Names what a save leaves out though training has changed it, at the save and again at its restore: plain attributes of
modules, tensors and optimizers, settings, non-persistent buffers, gradients between the steps of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.left_out import LeftOutNote
from holdfast.state import optimizer_wrappers
from holdfast.state.extras import GROUP
from holdfast.state.named import Named, modules_of
from holdfast.state.untracked.attributes import Attributes, plain_values, shown
from holdfast.state.untracked.buffers import Buffers
from holdfast.state.untracked.gradients import Gradients
from holdfast.state.untracked.optimizer_numbers import NamedOwner, is_number, owners
from holdfast.state.untracked.other_optimizers import OtherOptimizers
from holdfast.state.untracked.scalers import Scalers
from holdfast.state.untracked.settings import Settings
from holdfast.state.untracked.stored import AlreadyStored
from holdfast.state.untracked.traces import ForwardTracer, is_object
from holdfast.tensors import json_values
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import CorruptManifest

KEY = "unsaved"  # reserved in the group `extra`
LISTED_MAX = 20
STORED_MAX = 1000


@cache
def _of_every_optimizer() -> frozenset[str]:
    """The attributes that torch gives each. To make one imports torch's compiler, which takes a second the first time."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(0)])))


class Unsaved:
    """Observations of one state. It lives as long as the state; at a save it only compares a few values."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state, self._stored = state, AlreadyStored(state)
        self._attributes, self._buffers = Attributes(ForwardTracer(self._stored.has)), Buffers()
        self._settings = Settings()
        self.gradients, self.others, self.scalers = Gradients(state), OtherOptimizers(state), Scalers(state)
        self.last: Mapping[str, Any] = {}  # what the last save left out

    def record(self) -> None:
        """Record new objects, as part of a walk through the state."""
        self._stored.look_again()
        self._settings.look_again()
        self.others.hear()
        for key, value in self._state.items():
            for module in modules_of(value):
                named = [(name, part) for name, part in module.named_modules() if not _is_wrapper(part)]
                self._stored.flat = self._stored.flat or len(named) < sum(1 for _ in module.modules())
                self._attributes.see_modules(key, named)
                self._buffers.record(key, named)
                self._settings.record(key, module, named)
            if isinstance(value, Named) and value.form is not None:
                parts = value.form.parts()
                self._settings.record_modes(key, parts[0][1], parts)
            for path, owner in self._optimizers(key, value):
                around = (
                    not isinstance(owner, torch.optim.Optimizer) or owner not in optimizer_wrappers.find(value).optimizers
                )
                but = (name for name, held in vars(owner).items() if is_number(held) or (around and is_object(held)))
                self._attributes.record(path, owner, {*_of_every_optimizer(), *but})

    def changes(self) -> Mapping[str, Any]:
        """What is left out now: values and names of attributes, names of buffers, and whether there are gradients."""
        self._stored.look_at_values()
        changed = dict(list(self._attributes.changed().items())[:STORED_MAX])
        shown_numbers = shown(changed)
        notes = {
            "numbers": shown_numbers,
            "attributes": [path for path in changed if path not in shown_numbers],
            "buffers": self._buffers.changed()[:STORED_MAX],
            "gradients": self.gradients.accumulated(),
            **{kind: dict(list(held.items())[:STORED_MAX]) for kind, held in self._settings.changed().items()},
        }
        self.last = {kind: held for kind, held in notes.items() if held}
        return self.last

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what an optimizer has used."""
        self.gradients.stepped(optimizer)
        self.scalers.stepped(optimizer)
        self._settings.stepped()

    def before_refresh(self) -> None:
        """User hooks are about to recompute derived values after a restore: record earlier changes."""
        self._attributes.changed(whole=True)
        self._buffers.changed()

    def refreshed(self) -> None:
        """Values set by the hooks are no change of the training."""
        self._attributes.look_again()
        self._buffers.look_again()

    def settings(self) -> dict[str, bool]:
        return self._settings.flags()

    def values(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, value in self._state.items():
            for module in modules_of(value):
                for name, part in module.named_modules():
                    below = f"{key}.{name}" if name else key
                    plain.update(plain_values(below, vars(part)))
                    for of_tensor, tensor in (*part._parameters.items(), *part._buffers.items()):
                        plain.update(plain_values(f"{below}.{of_tensor}", getattr(tensor, "__dict__", {})))
            for path, owner in self._optimizers(key, value):
                plain.update(plain_values(path, vars(owner)))
        return plain

    def _optimizers(self, key: str, value: object) -> list[NamedOwner]:
        """An entry's optimizers of the user's classes, and their wrappers. torch's own have no counters."""
        named = owners(value) if optimizer_wrappers.is_optimizer(value) else ()
        return [
            one._replace(name=f"{key}.{one.name}")
            for one in named
            if hasattr(one.owner, "__dict__") and not type(one.owner).__module__.startswith("torch.")
        ]


def notes_of(found: Mapping[str, Any]) -> list[LeftOutNote]:
    """The notes for a save that leaves this out."""
    notes = []
    if paths := [*found.get("numbers", ()), *found.get("attributes", ())]:
        notes.append(
            f"not saved: plain attributes that have changed: {_listed(paths)}; register them as buffers, return them from "
            "get_extra_state(), or put them into the state"
        )
    if found.get("buffers"):
        notes.append(
            f"not saved: buffers that are not persistent and have changed: {_listed(found['buffers'])}; register them with "
            "persistent=True if they cannot be computed again"
        )
    if found.get("requires_grad"):
        notes.append(
            f"not saved: requires_grad of parameters, which has changed: {_listed(found['requires_grad'])}; set it "
            "again after a restore, as it is at that step"
        )
    if found.get("modes"):
        notes.append(
            f"not saved: the mode (train() or eval()) of submodules, which has changed: {_listed(found['modes'])}; "
            "set it again after a restore, as it is at that step"
        )
    if found.get("gradients"):
        notes.append(
            "not saved: gradients that were accumulated since the last optimizer step (.grad); save after the step, or put "
            "them into the state"
        )
    return [LeftOutNote(note) for note in notes]


class UnsavedState(NamedTuple):
    """What is left out, as a part of the state, for each rank."""

    unsaved: Unsaved

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        notes = self.unsaved.changes()
        if notes:
            content.add_value(GROUP, KEY, json_values.dumps(notes, KEY))

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Note what the save had left out, and what differs here."""
        plan, text = PartPlan(claimed={(GROUP, KEY)}, actions=[self.unsaved.gradients.restored]), stored.value(GROUP, KEY)
        if text is None or not selection.takes(GROUP, KEY):
            return plan
        saved = json_values.loads(text, KEY)
        kinds = ("numbers", "requires_grad", "modes")
        if not isinstance(saved, dict) or not all(isinstance(saved.get(kind, {}), dict) for kind in kinds):
            raise CorruptManifest(
                f"the stored value of {KEY} is not a list of what was left out",
                hint="restore another step, or exclude this name with exclude=",
                file="state.json",
            )
        other = _differing(saved.get("numbers", {}), self.unsaved.values())
        other += [str(path) for path in saved.get("attributes", ())]
        if other:
            plan.notes.append(LeftOutNote(f"not restored: plain attributes, which were not saved: {_listed(other)}"))
        if flags := _differing(saved.get("requires_grad", {}), self.unsaved.settings()):
            plan.notes.append(LeftOutNote(f"not restored: requires_grad of parameters: {_listed(flags)}"))
        if modes := [f"{path} ({'train' if mode else 'eval'})" for path, mode in saved.get("modes", {}).items()]:
            plan.notes.append(LeftOutNote(f"not restored: the mode of submodules, as it was when saved: {_listed(modes)}"))
        if saved.get("buffers"):
            plan.notes.append(LeftOutNote(f"not restored: buffers that are not persistent: {_listed(saved['buffers'])}"))
        if saved.get("gradients"):
            text = "gradients that were accumulated since the last optimizer step (.grad)"
            plan.notes.append(LeftOutNote(f"not restored: {text}"))
        return plan


def _differing(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Saved values that differ, or are missing here, with both values."""
    return [
        f"{path} (was {value!r}, is {live[path]!r})" if path in live else f"{path} (was {value!r})"
        for path, value in saved.items()
        if path not in live or live[path] != value
    ]


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


def _listed(names: Iterable[str]) -> str:
    held = list(names)
    return ", ".join(held[:LISTED_MAX]) + (", …" if len(held) > LISTED_MAX else "")
