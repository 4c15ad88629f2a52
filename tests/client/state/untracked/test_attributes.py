"""Attributes of modules and optimizers are found when they change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from holdfast.state.untracked.attributes import TEXT_MAX, Attributes, shown
from holdfast.state.untracked.traces import ForwardTracer


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
    return Attributes(ForwardTracer(lambda value: False))


def found(watch: Attributes, model: nn.Module) -> Any:
    watch.see_modules("m", model.named_modules())
    return watch.changed()


def test_attributes_of_modules_are_found_when_they_change() -> None:
    """Of the user's modules and torch's layers, by path and with their value; nothing that is stored otherwise."""
    watch, model = made(), nn.Sequential(Own(), Kept())
    assert found(watch, model) == {}
    model.eval()
    for one in model:
        one.calls, one.flag, one.name, one._calls, one._name = 4, True, "y", 1, "y"
        one._list.append(2)
        one.nan = float("nan")
    model[0].linear.in_features = 9
    changed = {"m.0.calls": 4, "m.0.flag": True, "m.0.name": "y", "m.0._calls": 1, "m.0._name": "y", "m.0._list": [1, 2]}
    changed["m.0.linear.in_features"] = 9
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
    watch.record("o", one, {"calls"})
    watch.record("p", object(), ())
    one.calls, one.flag = 1, True
    assert watch.changed() == {"o.flag": True}


def test_very_many_modules_are_compared_in_turn() -> None:
    """A number that begins to change late is found after a few saves, and stays found."""
    watch, model = made(), nn.ModuleList([Own() for _ in range(Attributes.AT_ONCE // 8)])
    watch.see_modules("m", model.named_modules())
    assert watch.changed() == {}
    model[-1].calls = model[0].calls = 1  # type: ignore[assignment]
    seen = [set(watch.changed()) for _ in range(4)]
    assert seen[0] < seen[3] == {"m.0.calls", f"m.{len(model) - 1}.calls"}


def test_numbers_and_short_texts_are_told_with_their_values() -> None:
    """Others by their names alone."""
    values = {"a": 1, "b": "x", "c": None, "d": True, "e": 0.5}
    assert shown(values | {"f": "x" * (TEXT_MAX + 1), "g": [1], "h": torch.ones(1), "i": 1j}) == values


@dataclass(slots=True)
class Phase:
    name: str = "warm"


PRIVATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "text": (lambda: "warm", lambda own: setattr(own, "_it", "main")),
    "nothing": (lambda: None, lambda own: setattr(own, "_it", "main")),
    "list": (lambda: [1], lambda own: own._it.append(2)),
    "mapping": (lambda: {"a": 1}, lambda own: own._it.update(a=2)),
    "set": (lambda: {1}, lambda own: own._it.add(2)),
    "object": (lambda: SimpleNamespace(n=1), lambda own: setattr(own._it, "n", 2)),
    "object with slots": (Phase, lambda own: setattr(own._it, "name", "main")),
    "stream": (lambda: random.Random(1), lambda own: own._it.random()),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_attributes_of_the_user_are_found(kind: str) -> None:
    """Of any kind, once they change."""
    (make, change), model = PRIVATE[kind], nn.Sequential(Own())
    model[0]._it = make()
    watch = made()
    assert found(watch, model) == {} == found(watch, model)
    change(model[0])
    assert set(found(watch, model)) == {"m.0._it"}


class Framework(nn.Module):
    """As the base class that a framework gives its users."""

    __module__ = "lightning.pytorch.core"

    def __init__(self) -> None:
        super().__init__()
        self._hook, self._held, self._frames = None, {}, []  # type: ignore[var-annotated]

    @property
    def hook(self) -> Any:
        return self._hook or (lambda: self._frames)


class Adapter:
    __module__ = "peft.tuners"


class OnFramework(Framework):
    def __init__(self) -> None:
        super().__init__()
        self._own, self._rope_cache, self._adapter = [1], {}, Adapter()  # type: ignore[var-annotated]


def test_private_attributes_of_frameworks_are_theirs() -> None:
    """What their classes use in their code, their objects, and caches; not what a user's class adds to them."""
    watch, model = made(), OnFramework()
    assert found(watch, model) == {}
    model._hook, model._held["a"], model._rope_cache["a"] = "training_step", 1, 2  # type: ignore[assignment]
    model._frames.append(1)
    model._adapter.n = 1  # type: ignore[attr-defined]
    model._hf_hook = Adapter()
    model._is_marked = True
    assert found(watch, model) == {}
    model._own.append(2)
    assert set(found(watch, model)) == {"m._own"}


def test_what_comes_later_counts_or_is_looked_at() -> None:
    """An attribute that a module of the user gets in training has changed; marks on torch's layers have not."""
    watch, model = made(), nn.Sequential(Own(), nn.Linear(1, 1))
    assert found(watch, model) == {}
    model[0].reference, model[0]._begun, model[1].mark = torch.ones(1), True, 3  # type: ignore[assignment]
    assert set(found(watch, model)) == {"m.0.reference"}
    model[0]._begun, model[1].mark = False, 4  # type: ignore[assignment]
    assert set(found(watch, model)) == {"m.0.reference", "m.0._begun", "m.1.mark"}


def test_settings_of_torch_s_layers_are_found() -> None:
    """Those that a schedule changes; not what a lazy layer finds out, nor what a layer computes."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.LazyLinear(2), nn.GRU(2, 2), weight_norm(nn.Linear(2, 2)))
    watch = made()
    assert found(watch, model) == {}
    model[3](model[2](model[1](model[0](torch.ones(2, 3)))))
    assert found(watch, model) == {}
    model[0].p, model[1].momentum, model[2].out_features, model[4].in_features = 0.1, None, 3, 5
    names = {"m.0.p": 0.1, "m.1.momentum": None, "m.2.out_features": 3, "m.4.in_features": 5}
    assert {name: value for name, value in found(watch, model).items() if name != "m.2.out_features"} == {
        name: value for name, value in names.items() if name != "m.2.out_features"
    }
    model[2].out_features = 4
    assert found(watch, model) == names | {"m.2.out_features": 4}


def test_a_class_that_torch_derives_is_the_user_s() -> None:
    """As FSDP2 and parametrizations do it."""
    watch, model = made(), Own()
    nn.utils.parametrize.register_parametrization(model.linear, "weight", nn.Identity())
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    nn.utils.parametrize.register_parametrization(model, "scale", nn.Identity())
    assert type(model).__module__.startswith("torch.") and found(watch, model) == {}
    model.calls = 3
    assert found(watch, model) == {"m.calls": 3}


class Packed(torch.Tensor):
    """As weights that keep what they are made of in attributes."""

    __tensor_flatten__ = True


def test_attributes_of_tensors_are_found() -> None:
    """Of parameters and buffers, also those that come later; not marks, gradients, or what is saved anyway."""
    model = nn.BatchNorm1d(2)
    packed = nn.Module()
    packed.register_buffer("table", torch.ones(2).as_subclass(Packed))
    model.packed = packed
    packed.table.scale = 1  # type: ignore[union-attr]
    weight, bias, mean = model.weight, model.bias, model.running_mean
    assert mean is not None
    weight.scale, weight.allreduce, weight.main_grad = 1.0, True, torch.zeros(2)  # type: ignore[attr-defined]
    mean.history = [1]  # type: ignore[attr-defined]
    watch = made()
    assert found(watch, model) == {}
    weight.main_grad += 1  # type: ignore[attr-defined]
    weight.sequence_parallel = bias.tensor_model_parallel = True  # type: ignore[attr-defined]
    packed.table.scale = 2  # type: ignore[union-attr]
    assert found(watch, model) == {} == found(watch, model)
    weight.scale, bias.scale = 3.0, 2.0  # type: ignore[attr-defined]
    mean.history.append(2)  # type: ignore[attr-defined]
    bias.tensor_model_parallel = False  # type: ignore[attr-defined]
    changed = {
        "m.weight.scale": 3.0,
        "m.bias.scale": 2.0,
        "m.running_mean.history": [1, 2],
        "m.bias.tensor_model_parallel": False,
    }
    assert found(watch, model) == changed
    model.weight = nn.Parameter(torch.ones(2))
    assert found(watch, model) == changed
    model.weight.scale = 5.0  # type: ignore[union-attr]
    assert "m.weight.scale" in found(watch, model)
