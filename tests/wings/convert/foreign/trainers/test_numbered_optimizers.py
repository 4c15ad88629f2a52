"""Optimizers that number their parameters are stored by these numbers, exactly as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state, reading
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.trainers import numbered_optimizers
from holdfast_service.wings.convert.foreign.trainers.numbered_optimizers import HeldOptimizer
from tests.wings.convert.foreign.directories import OnDisk


def collected(place: Path, *values: Any) -> tuple[GatheredListing, int | None]:
    held = []
    for number, value in enumerate(values):
        torch.save(value, place / f"{number}.pt")
        held.append(HeldOptimizer(read_torch(OnDisk(place), f"{number}.pt"), f"{number}.pt"))
    gathered = GatheredListing(OnDisk(place))
    return gathered, numbered_optimizers.collect(gathered, held)


def state(**kept: Any) -> dict[str, Any]:
    return {"state": {0: kept} if kept else {}, "param_groups": [{"params": [0, 1], "lr": 0.5, "param_names": ["a", "b"]}]}


def test_several_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    gathered, steps = collected(
        tmp_path, state(exp_avg=torch.ones(2), step=torch.tensor(7.0)), state(step=torch.tensor(9.0))
    )
    assert steps == 9
    assert set(gathered.tensors) == {TensorKey("optim", name) for name in ("0/exp_avg", "0/step", "2/step")}
    document = gathered.documents["optim"]["optim"]
    assert optimizer_state.is_numbered(document)
    groups = {name: group for name, group in document["groups"].items() if name != "$keys"}
    assert [group["params"] for group in groups.values()] == [["0", "1"], ["2", "3"]]
    assert all(group["lr"] == 0.5 and "param_names" not in group for group in groups.values())


def test_numbers_of_steps_masters_and_other_values(tmp_path: Path) -> None:
    """Adam's step is a tensor, as torch has it now; another optimizer's stays a number. Lists of tensors stay lists."""
    gathered, steps = collected(
        tmp_path,
        state(exp_avg=torch.ones(2), step=4),
        state(exp_avg_sq_row=torch.ones(2), step=5, RMS=0.25, master_param=torch.ones(2), past=[torch.arange(2.0)]),
    )
    assert steps == 5
    step = gathered.tensors[TensorKey("optim", "0/step")]
    assert (step.spec.dtype, step.spec.shape) == ("F32", ()) and reading.fetched(OnDisk(tmp_path), step) == 4
    document = gathered.documents["optim"]["optim"]
    kept = document["state"]["2"]
    assert kept["step"] == 5 and kept["RMS"] == 0.25
    (past,) = kept["past"]
    assert reading.fetched(OnDisk(tmp_path), gathered.tensors[TensorKey("optim", past["$tensor"])]).tolist() == [0, 1]
    assert document["masters"] == {"master_param": ["2"]}
    assert TensorKey("master", "2") in gathered.tensors


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "not a state dict"),
        ({**state(), "more": 1}, "not a state dict"),
        ({**state(), "state": []}, "not a state dict"),
        ({**state(), "param_groups": [{"lr": 1}]}, "not a state dict"),
        ({**state(), "param_groups": [{"params": [1, 0]}]}, "does not number its parameters in order"),
        ({**state(), "param_groups": [{"params": ["a"]}]}, "does not number its parameters in order"),
        ({**state(), "state": {"a": {}}}, "does not number its parameters in order"),
        ({**state(), "state": {5: {}}}, "none of its groups"),
        ({**state(), "state": {0: 1}}, "none of its groups"),
        (state(**{"a/b": torch.ones(1)}), "a name that a checkpoint cannot store"),
        (state(kind=torch.strided), "cannot be kept"),
    ],
)
def test_other_values_are_refused_by_file(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(StateMismatch, match=said) as refused:
        collected(tmp_path, value)
    assert refused.value.members["file"] == "0.pt" and refused.value.hint
