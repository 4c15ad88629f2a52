"""Names what a save leaves out though training has changed it, at the save and again at its restore: plain numbers of
modules, buffers that are not persistent, gradients between the steps of an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from holdfast.left_out import LeftOutNote
from holdfast.state.extras import GROUP
from holdfast.state.named import modules_of
from holdfast.state.untracked.buffers import Buffers
from holdfast.state.untracked.gradients import Gradients
from holdfast.state.untracked.module_numbers import ModuleNumbers
from holdfast.tensors import json_values
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import CorruptManifest

KEY = "unsaved"  # reserved in the group `extra`
LISTED_MAX = 20
STORED_MAX = 1000


class Unsaved:
    """What was seen of one state. It lasts as long as the state; all that it does at a save is to compare a few numbers."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._numbers, self._buffers = ModuleNumbers(), Buffers()
        self.gradients = Gradients(state)
        self.last: Mapping[str, Any] = {}  # what the last save left out

    def see(self) -> None:
        """Take a first look at what is new, as part of a walk through the state."""
        for key, value in self._state.items():
            for module in modules_of(value):
                named = [(name, part) for name, part in module.named_modules() if not _is_wrapper(part)]
                self._numbers.see(key, named)
                self._buffers.see(key, named)

    def found(self) -> Mapping[str, Any]:
        """What is left out now: values of numbers and names of buffers by path, and whether there are gradients."""
        numbers = dict(list(self._numbers.changed().items())[:STORED_MAX])
        buffers = self._buffers.changed()[:STORED_MAX]
        found = {"numbers": numbers, "buffers": buffers, "gradients": self.gradients.accumulated()}
        self.last = {kind: held for kind, held in found.items() if held}
        return self.last

    def numbers(self) -> dict[str, Any]:
        """All numbers of modules as they are now, by path."""
        held = {}
        for key, value in self._state.items():
            for module in modules_of(value):
                for name, part in module.named_modules():
                    own = f"{key}.{name}" if name else key
                    held.update({f"{own}.{k}": v for k, v in vars(part).items() if type(v) in (int, float)})
        return held


def notes_of(found: Mapping[str, Any]) -> list[LeftOutNote]:
    """What to tell of a save that leaves this out."""
    notes = []
    if found.get("numbers"):
        notes.append(
            f"not saved: numbers that modules keep as plain attributes and that have changed: {_listed(found['numbers'])}; "
            "register them as buffers, or return them from get_extra_state()"
        )
    if found.get("buffers"):
        notes.append(
            f"not saved: buffers that are not persistent and have changed: {_listed(found['buffers'])}; register them with "
            "persistent=True if they cannot be computed again"
        )
    if found.get("gradients"):
        notes.append(
            "not saved: gradients that were accumulated since the last optimizer step (.grad); save after the step, or put "
            "them into the state"
        )
    return [LeftOutNote(note) for note in notes]


class UnsavedState(NamedTuple):
    """What is left out, as a part of the state: each rank remembers its own."""

    unsaved: Unsaved

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        found = self.unsaved.found()
        if found:
            content.add_value(GROUP, KEY, json_values.dumps(found, KEY))

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Note what the save had left out, and what of it is another here."""
        plan, text = PartPlan(claimed={(GROUP, KEY)}, actions=[self.unsaved.gradients.restored]), stored.value(GROUP, KEY)
        if text is None or not selection.takes(GROUP, KEY):
            return plan
        saved = json_values.loads(text, KEY)
        if not isinstance(saved, dict) or not isinstance(saved.get("numbers", {}), dict):
            raise CorruptManifest(f"the stored value of {KEY} is not a list of what was left out", file="state.json")
        live = self.unsaved.numbers()
        other = [
            f"{path} (was {value!r}, is {live[path]!r})" if path in live else f"{path} (was {value!r})"
            for path, value in saved.get("numbers", {}).items()
            if live.get(path) != value
        ]
        if other:
            text = f"plain attributes of modules, which were not saved: {_listed(other)}"
            plan.notes.append(LeftOutNote(f"not restored: {text}"))
        if saved.get("buffers"):
            plan.notes.append(LeftOutNote(f"not restored: buffers that are not persistent: {_listed(saved['buffers'])}"))
        if saved.get("gradients"):
            text = "gradients that were accumulated since the last optimizer step (.grad)"
            plan.notes.append(LeftOutNote(f"not restored: {text}"))
        return plan


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


def _listed(names: Iterable[str]) -> str:
    held = list(names)
    return ", ".join(held[:LISTED_MAX]) + (", …" if len(held) > LISTED_MAX else "")
