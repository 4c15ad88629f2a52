"""An optimizer in a torch file is imported by the names of its parameters, where these are certain; or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state, reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.torch_weights import FILE_KIND


class Tied(nn.Module):
    """Parameters of equal shapes, one without dimensions, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.three.weight = self.one.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(rows))).square().sum() * self.scale


NamedSnapshot = Callable[[nn.Module], torch.optim.Optimizer]


def _trained(given: NamedSnapshot) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Tied()
    optimizer = given(model)
    for _ in range(2):
        model(torch.randn(4, 3)).backward()
        optimizer.step()
    return model, optimizer


def _read(directory: Path, value: Any) -> ForeignListing:
    torch.save(value, directory / "a.pt")
    return FILE_KIND.read(hub_snapshot.opened(directory), ReadOptions())


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[1::2], "lr": 0.5}, {"params": named[0::2]}]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), False),
        (lambda model: torch.optim.AdamW(_groups(model)), True),
        (lambda model: torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9), False),
    ],
    ids=["in order", "by names", "momentum"],
)
def test_names_or_numbers(tmp_path: Path, given: NamedSnapshot, named: bool) -> None:
    """All of its state is that of the right parameter, and so are hyper-parameters. Parameters of equal shapes keep their
    numbers: whether the optimizer had them in the model's order is not in the file.
    """
    model, optimizer = _trained(given)
    listing = _read(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    labels = ((name, p) for name, p in model.named_parameters()) if named else ((str(n), p) for n, p in numbered)
    names = {id(value): name for name, value in labels}
    wanted = {f"{names[id(p)]}/{kind}": held for p, state in optimizer.state.items() for kind, held in state.items()}
    found = {key.name: tensor for key, tensor in listing.tensors.items() if key.group == "optim"}
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        value = reading.fetched(hub_snapshot.opened(tmp_path), tensor)
        assert value.tobytes() == wanted[name].numpy().tobytes() and value.shape == wanted[name].shape
    document = listing.documents["optim"][optimizer_state.KEY]
    kept = [value for key, value in document["groups"].items() if key != "$keys"]
    assert [group["params"] for group in kept] == [
        [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
    ]
    assert [group["lr"] for group in kept] == [group["lr"] for group in optimizer.param_groups]
    assert listing.documents["extra"] == {"epoch": 3}
    assert any("numbers its" in note for note in listing.notes) is not named


def test_distinct_shapes_say_the_names(tmp_path: Path) -> None:
    """The order of the model, which no other order of these shapes could be."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    listing = _read(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert {"weight/exp_avg", "bias/exp_avg"} <= {key.name for key in listing.tensors}
    assert any("have no names" in note for note in listing.notes)


def test_masters_steps_and_other_values(tmp_path: Path) -> None:
    """A step that is a number becomes a tensor, as torch has it now; masters are masters; the rest is in the document."""
    state = {0: {"exp_avg": torch.ones(2), "step": 4, "master_param": torch.full((2,), 0.5), "note": (1, "a")}}
    optimizer = {"state": state, "param_groups": [{"params": [0], "lr": 0.5}]}
    listing = _read(tmp_path, {"model": {"w": torch.ones(2).bfloat16()}, "opt": optimizer})
    files = hub_snapshot.opened(tmp_path)
    assert set(listing.tensors) == {
        TensorKey(*key) for key in (("model", "w"), ("optim", "w/exp_avg"), ("optim", "w/step"), ("master", "w"))
    }
    assert reading.fetched(files, listing.tensors[TensorKey("optim", "w/step")]) == 4
    assert reading.fetched(files, listing.tensors[TensorKey("master", "w")]).tolist() == [0.5, 0.5]
    document = listing.documents["optim"][optimizer_state.KEY]
    assert document["masters"] == {"master_param": ["w"]}
    assert document["state"] == {"w": {"note": {"$tuple": [1, "a"]}}}


def _state(names: int, **group: Any) -> dict[str, Any]:
    held = {number: {"exp_avg": torch.ones(2)} for number in range(names)}
    return {"state": held, "param_groups": [{"params": list(range(names)), "lr": 0.5, **group}]}


_HALF = [{"params": [0]}, {"params": [1]}]


@pytest.mark.parametrize(
    "optimizer",
    [
        _state(1),
        _state(2),
        _state(3),
        {**_state(2), "param_groups": _HALF},
        {**_state(2), "state": {0: {"exp_avg": torch.ones(2)}}},
        {**_state(2), "state": {n: {"exp_avg": torch.ones(3)} for n in (0, 1)}},
        {**_state(2), "state": {n: {"step": torch.tensor(1.0)} for n in (0, 1)}},
        _state(2, param_names=["a", "c"]),
        _state(2, param_names=["a", "a"]),
        _state(2, param_names=["a", ["b"]]),
        _state(2, param_names=["a"]),
    ],
)
def test_numbers_stay_where_names_are_not_certain(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Another number, other shapes, several groups, names of nothing: a restore takes the live optimizer's names."""
    listing = _read(tmp_path, {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "optimizer": optimizer})
    assert optimizer_state.is_numbered(listing.documents["optim"][optimizer_state.KEY])
    kept = {key.name for key in listing.tensors if key.group == "optim"}
    assert kept == {f"{number}/{kind}" for number, held in optimizer["state"].items() for kind in held}


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"state": {}, "param_groups": [{"params": ["a", "c"]}]}, "duplicate parameters, or some that the model lacks"),
        ({"state": {}, "param_groups": [{"params": ["a", "a"]}]}, "neither names its parameters nor number"),
        ({**_state(2), "state": {5: {}}}, "neither names its parameters nor number"),
        ({**_state(2), "param_groups": [{"params": [1, 0]}]}, "neither names its parameters nor number"),
        ({**_state(2), "param_groups": [{"lr": 1}]}, "not a state dict that torch writes"),
        ({**_state(2), "state": {n: {"a/b": torch.ones(2 + n)} for n in (0, 1)}}, "a name that a checkpoint cannot store"),
        ({**_state(2), "state": {n: {"x": torch.ones(2 + n), "y": [torch.ones(1)]} for n in (0, 1)}}, "only tensors"),
    ],
)
def test_what_is_not_certain(tmp_path: Path, optimizer: dict[str, Any], said: str) -> None:
    """What torch does not write, and names of nothing: refused by key, with what to do."""
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(StateMismatch, match=said) as refused:
        _read(tmp_path, {"model": weights, "optimizer": optimizer})
    assert refused.value.members["file"] == "a.pt" and refused.value.members["tensor"].startswith("optimizer")
    assert refused.value.hint


def test_two_of_them(tmp_path: Path) -> None:
    """Two without names are refused; with names each has a document of its own, if no parameter is in both."""
    weights = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(StateMismatch, match="'first', which is one of several") as refused:
        _read(tmp_path, {"model": weights, "first": _state(1), "second": _state(1)})
    assert "--leave-out first --leave-out second" in refused.value.hint
    with pytest.raises(StateMismatch, match="'second', which has state 'a/exp_avg', as another one"):
        _read(
            tmp_path,
            {"model": weights, "first": _state(2, param_names=["a", "b"]), "second": _state(2, param_names=["a", "b"])},
        )
    each = [_state(1, param_names=[name]) for name in "ab"]
    listing = _read(tmp_path, {"model": weights, "optimizers": each})
    assert set(listing.documents["optim"]) == {"optimizers[0]", "optimizers[1]"}
    assert {key.name for key in listing.tensors if key.group == "optim"} == {"a/exp_avg", "b/exp_avg"}


@pytest.mark.parametrize("groups", [False, True])
def test_parameters_by_name(tmp_path: Path, groups: bool) -> None:
    """As `get_state_dict()` of torch.distributed.checkpoint has them, which needs no numbers."""
    model, optimizer = _trained(lambda m: torch.optim.AdamW(_groups(m) if groups else m.parameters(), lr=0.1))
    weights, state = get_state_dict(model, optimizer)
    listing = _read(tmp_path, {"model": weights, "optimizer": state})
    for name, parameter in model.named_parameters():
        found = reading.fetched(hub_snapshot.opened(tmp_path), listing.tensors[TensorKey("optim", f"{name}/exp_avg")])
        assert found.tobytes() == optimizer.state[parameter]["exp_avg"].numpy().tobytes()
    assert not any("no names" in note for note in listing.notes)
    state["state"]["nobody"] = {}
    with pytest.raises(StateMismatch, match="neither names its parameters nor numbers them"):
        _read(tmp_path, {"model": weights, "optimizer": state})
