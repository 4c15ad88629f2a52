"""Numbers in attributes of modules are found when they change."""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast.state.untracked.module_numbers import ModuleNumbers


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls, self.decay, self.flag, self.name = 0, 0.9, False, "x"


class Kept(Own):
    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def found(watch: ModuleNumbers, model: nn.Module) -> Any:
    watch.see("m", model.named_modules())
    return watch.changed()


def test_numbers_of_modules_are_found_when_they_change() -> None:
    """Ints and floats of the user's modules, by path and with their value; no flags, and none that is stored otherwise."""
    watch, model = ModuleNumbers(), nn.Sequential(Own(), Kept())
    assert found(watch, model) == {}
    for one in (model[0], model[1]):
        one.calls, one.flag, one.name = 4, True, "y"  # type: ignore[union-attr, assignment]
    model[0].linear.in_features = 9
    assert found(watch, model) == {"m.0.calls": 4}
    model[0].decay = 0.5  # type: ignore[assignment]
    model.append(Own())
    assert found(watch, model) == {"m.0.calls": 4, "m.0.decay": 0.5}
    model[2].calls = 1  # type: ignore[assignment]
    model[0].calls = None  # type: ignore[assignment]
    assert found(watch, model) == {"m.0.decay": 0.5, "m.2.calls": 1}


def test_very_many_modules_are_compared_in_turn() -> None:
    """A number that begins to change late is found after a few saves, and stays found."""
    watch, model = ModuleNumbers(), nn.ModuleList([Own() for _ in range(3 * ModuleNumbers.AT_ONCE)])
    watch.see("m", model.named_modules())
    for _ in range(ModuleNumbers.WHOLE):
        assert watch.changed() == {}
    model[-1].calls = model[0].calls = 1  # type: ignore[assignment]
    seen = [set(watch.changed()) for _ in range(3)]
    assert seen[0] < seen[2] == {"m.0.calls", f"m.{len(model) - 1}.calls"}
