"""Floats restored into another float dtype: the values of torch's `.to`, in place, noted, and nothing else is cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state.train_state import TrainState
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint, restore, save

PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float64),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Every rounding case that 16 bits can decide: halves between neighbours, both signs, subnormals, zeros, infinities."""
    halves = torch.arange(0x3F000000, 0x3F000000 + 0x40000, 0x1000, dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, 1e-40, -1e-42, float("inf"), float("-inf"), 3.0e4, -3.0e4, 1e-8])
    return torch.cat([halves, -halves, ends, torch.randn(999)]).to(dtype)


@pytest.mark.parametrize(("stored", "live"), PAIRS, ids=str)
def test_values_are_those_of_torch(stored: torch.dtype, live: torch.dtype) -> None:
    """Rounded to nearest even, in the live memory, and the note says what was cast."""
    values, target = awkward(stored), torch.zeros_like(awkward(stored), dtype=live)
    restoration = restore(save({"model": {"w": values}}), {"model": {"w": target}}, cast=True)
    assert torch.equal(bits(target), bits(values.to(live)))
    assert any("1 tensor was cast from" in note and "model/w" in note for note in restoration.notes)


def test_not_unasked() -> None:
    """Without the option it is refused before anything changes, and the hint names it."""
    live = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(StateMismatch, match="stored F32") as told:
        restore(save({"model": {"w": torch.ones(3)}}), {"model": {"w": live}})
    assert "cast=True" in told.value.hint and not live.any()


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.int64, torch.float32),
        (torch.int32, torch.int64),
        (torch.bool, torch.float32),
        (torch.float32, torch.int32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.complex64, torch.float32),
    ],
    ids=str,
)
def test_nothing_but_floats(stored: torch.dtype, live: torch.dtype) -> None:
    """Integers, booleans, and floats that need a scale are refused as ever."""
    with pytest.raises(StateMismatch, match="model/w: stored") as told:
        values, target = torch.ones(4).to(stored), torch.zeros(4, dtype=live)
        restore(save({"model": {"w": values}}), {"model": {"w": target}}, cast=True)
    assert "cast=True" not in told.value.hint


def test_other_shapes_are_refused() -> None:
    with pytest.raises(StateMismatch, match="model/w"):
        restore(save({"model": {"w": torch.ones(4)}}), {"model": {"w": torch.ones(5).bfloat16()}}, cast=True)


def test_what_does_not_fit_is_refused() -> None:
    """A finite number that would become infinite is an error with the name; infinities stay what they are."""
    live = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(StateMismatch, match=r"model/w: stored values up to 1e\+05 do not fit into F16"):
        restore(save({"model": {"w": torch.tensor([1.0, 1e5])}}), {"model": {"w": live}}, cast=True)
    restore(save({"model": {"w": torch.tensor([1.0, float("inf")])}}), {"model": {"w": live}}, cast=True)
    assert live.tolist() == [1.0, float("inf")]


def trained(dtype: torch.dtype, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)).to(dtype)
    model.add_module("head", nn.Linear(4, 3, bias=False).to(dtype))
    model[2].weight = model.get_submodule("head").weight  # type: ignore[assignment]  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optim": optimizer}


def test_a_whole_state_of_a_module_and_its_optimizer() -> None:
    """Weights, moments, buffers and tied tensors; counts of batches are integers, and stay so."""
    saved, live = trained(torch.float32, 1), trained(torch.bfloat16, 2)
    kept = [parameter for parameter in live["model"].parameters()]
    restore(save(saved), live, cast=True)
    for (name, theirs), (_, mine) in zip(
        saved["model"].state_dict().items(), live["model"].state_dict().items(), strict=True
    ):
        assert torch.equal(bits(mine), bits(theirs.to(mine.dtype))), name
    for theirs, mine in zip(saved["model"].parameters(), kept, strict=True):
        one, two = saved["optim"].state[theirs], live["optim"].state[mine]
        assert torch.equal(two["exp_avg"], one["exp_avg"].bfloat16()) and two["step"].dtype == torch.float32
    assert all(a is b for a, b in zip(kept, live["model"].parameters(), strict=True))


def test_parts_of_a_tensor() -> None:
    """A rank that holds rows of it takes its rows, strided memory as well."""
    whole = torch.randn(6, 4)
    checkpoint = save({"model": {"w": whole}})
    local = torch.zeros(4, 3, dtype=torch.bfloat16).t()
    state = TrainState({"model": {"w": Fragment(local, (6, 4), offset=(2, 0))}}, 0, 2)
    restoration = state.prepare(checkpoint.stored(), cast=True)
    checkpoint.fill(restoration)
    restoration.apply()
    assert torch.equal(local, whole[2:5].bfloat16())


def test_masters_follow_weights_that_were_cast() -> None:
    """A cast weight counts as restored: its stale master is refused, or set from what the weight is now."""
    model = nn.Linear(4, 3).bfloat16()
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    checkpoint = save({"model": nn.Linear(4, 3)})
    state = {"model": model, "master": masters}
    before = copy.deepcopy(masters)
    with pytest.raises(StateMismatch, match="full-precision masters"):
        restore(checkpoint, state, groups=["model"], cast=True)
    assert all(torch.equal(masters[name], before[name]) for name in masters)
    restore(checkpoint, state, groups=["model"], cast=True, from_model="from-model")
    assert all(torch.equal(masters[name], parameter.float()) for name, parameter in model.named_parameters())
    assert torch.equal(model.weight, checkpoint.tensors["model", "weight"].bfloat16())


def test_two_stored_tensors_of_one_live_tensor_are_compared_as_cast() -> None:
    """Tied here and saved as two that differ: refused by name; where that is excused the first one counts, with a note."""
    saved = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    live = torch.zeros(3, dtype=torch.bfloat16)
    checkpoint = Checkpoint(TrainState({"model": saved}, 0, 1).snapshot())
    with pytest.raises(StateMismatch, match="model/b is model/a here"):
        restore(checkpoint, {"model": {"a": live, "b": live}}, cast=True)
    assert live.tolist() == [0.0] * 3
    restoration = restore(checkpoint, {"model": {"a": live, "b": live}}, cast=True, strict=False)
    assert live.tolist() == [1.0] * 3
    assert any("model/b is model/a here" in note for note in restoration.notes)


@pytest.mark.parametrize(("stored", "live"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_never_stepped_can_step(stored: torch.dtype, live: torch.dtype, kind: Any) -> None:
    """torch's optimizers keep moments in the dtype of their parameters, and refuse to step with others."""
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def made(dtype: torch.dtype) -> dict[str, Any]:
        model = nn.Linear(3, 4).to(dtype)
        return {"model": model, "optim": kind(model.parameters(), lr=0.1, **more)}

    def step(state: dict[str, Any]) -> None:
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optim"].step()

    saved, fresh = made(stored), made(live)
    step(saved)
    done = restore(save(saved), fresh, cast=True)
    key = "exp_avg" if kind is torch.optim.AdamW else "momentum_buffer"
    assert any(f"optim/weight/{key}" in note for note in done.notes)
    for theirs, mine in zip(saved["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(fresh["optim"].state[mine][key], saved["optim"].state[theirs][key].to(live))
    step(fresh)
