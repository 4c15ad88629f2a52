"""Attributes of modules and optimizers are found when they change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.state.untracked.attributes import TEXT_MAX, Attributes, shown
from holdfast.state.untracked.traces import Tracer


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls, self.decay, self.flag, self.name, self.none = 0, 0.9, False, "x", None
        self._calls, self._name, self._list = 0, "x", [1]
        self.nan, self.list = float("nan"), [1]


class Kept(Own):
    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def made() -> Attributes:
    return Attributes(Tracer(lambda value: False))


def found(watch: Attributes, model: nn.Module) -> Any:
    watch.see_modules("m", model.named_modules())
    return watch.changed()


def test_attributes_of_modules_are_found_when_they_change() -> None:
    """Of the user's modules, by path and with their value; nothing that is stored otherwise, and no mode of torch."""
    watch, model = made(), nn.Sequential(Own(), Kept())
    assert found(watch, model) == {}
    model.eval()
    for one in model:
        one.calls, one.flag, one.name, one._calls, one._name = 4, True, "y", 1, "y"
        one._list.append(2)
        one.nan = float("nan")
    model[0].linear.in_features = 9
    changed = {"m.0.calls": 4, "m.0.flag": True, "m.0.name": "y", "m.0._calls": 1}
    assert found(watch, model) == changed
    model[0].decay = 0.5  # type: ignore[assignment]
    model[0].none = torch.ones(1)
    model[0].list.append(2)  # type: ignore[operator, union-attr]
    model.append(Own())
    assert found(watch, model) == changed | {"m.0.decay": 0.5, "m.0.none": torch.ones(1), "m.0.list": [1, 2]}
    model[2].calls = 1  # type: ignore[assignment]
    model[0].calls = None  # type: ignore[assignment]
    assert found(watch, model)["m.0.calls"] is None and found(watch, model)["m.2.calls"] == 1


def test_attributes_of_other_objects_are_found_but_for_some() -> None:
    """Those that are stored otherwise are not looked at; an object without attributes has none."""
    watch, one = made(), Own()
    watch.see("o", one, {"calls"})
    watch.see("p", object(), ())
    one.calls, one.flag = 1, True
    assert watch.changed() == {"o.flag": True}


def test_very_many_modules_are_compared_in_turn() -> None:
    """A number that begins to change late is found after a few saves, and stays found."""
    watch, model = made(), nn.ModuleList([Own() for _ in range(3 * Attributes.AT_ONCE)])
    watch.see_modules("m", model.named_modules())
    for _ in range(Attributes.WHOLE):
        assert watch.changed() == {}
    model[-1].calls = model[0].calls = 1  # type: ignore[assignment]
    seen = [set(watch.changed()) for _ in range(3)]
    assert seen[0] < seen[2] == {"m.0.calls", f"m.{len(model) - 1}.calls"}


def test_numbers_and_short_texts_are_told_with_their_values() -> None:
    """Others by their names alone."""
    values = {"a": 1, "b": "x", "c": None, "d": True, "e": 0.5}
    assert shown(values | {"f": "x" * (TEXT_MAX + 1), "g": [1], "h": torch.ones(1), "i": 1j}) == values
