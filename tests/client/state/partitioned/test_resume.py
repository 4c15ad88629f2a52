"""Blocks of one rank: another form is refused by name, and quantised again if that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.left_out import LeftOutNote
from holdfast_formats.errors import StateMismatch
from tests.client.checkpoint_in_memory import restore, save
from tests.low_bit import TABLE, TABLE_4BIT, ByKeys, Wrapping


def trained(kind: Any, seed: int, *steps: int) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(32, 64)
    optimizer = kind(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 32), float(step))).square().mean().backward()
        optimizer.step()
    return {"model": model, "optim": optimizer}, optimizer


def momentum(state: dict[str, Any]) -> torch.Tensor:
    return state["optim"].held(state["optim"].state[state["model"].weight])


class Plain(Wrapping):
    """The same optimizer without blocks."""

    def begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["momentum"] = torch.zeros_like(parameter)


FORMS = {
    "8-bit": Wrapping,
    "4-bit": lambda parameters: Wrapping(parameters, TABLE_4BIT),
    "plain": Plain,
}


@pytest.mark.parametrize(
    ("before", "after"), [("8-bit", "4-bit"), ("4-bit", "8-bit"), ("8-bit", "plain"), ("plain", "8-bit")]
)
def test_another_form_is_quantised_only_if_asked(before: str, after: str) -> None:
    saved, _ = trained(FORMS[before], 1, 1, 2)
    live, optimizer = trained(FORMS[after], 2, 3)
    held = momentum(live).clone()
    with pytest.raises(StateMismatch, match="weight/momentum"):
        restore(save(saved), live)
    assert torch.equal(momentum(live), held)
    found = restore(save(saved), live, requantise=True)
    (note,) = (note for note in found.notes if "quantised again" in note)
    assert isinstance(note, LeftOutNote) and "optim: weight/momentum" in note
    step = 0.0 if after == "plain" else 1 / 15 if after == "4-bit" else 1 / 255
    expected = momentum(saved)
    assert float((momentum(live) - expected).abs().max()) <= step * float(expected.abs().max()) * 1.001
    assert len(optimizer.state[live["model"].weight]["momentum"]) == 64


@pytest.mark.parametrize("asked", [True, False])
def test_the_same_form_is_exact(asked: bool) -> None:
    """Also if it may be quantised again: nothing moves, and nothing is noted."""
    for kind in (Wrapping, ByKeys):
        saved, _ = trained(kind, 1, 1, 2)
        live, _ = trained(kind, 2)
        found = restore(save(saved), live, requantise=asked)
        assert torch.equal(momentum(live), momentum(saved)) and not [note for note in found.notes if "again" in note]


def test_a_table_of_its_own_is_restored() -> None:
    """The stored table comes with the codes."""
    saved, optimizer = trained(ByKeys, 1, 1)
    optimizer.state[saved["model"].weight]["qmap1"] = TABLE.square() * TABLE.sign()
    live, _ = trained(ByKeys, 2)
    restore(save(saved), live)
    assert torch.equal(momentum(live), momentum(saved))
