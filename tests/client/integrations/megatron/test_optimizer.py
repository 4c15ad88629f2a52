"""What an optimizer of a rank steps, as parts of stored tensors; and where different optimizers count their steps."""

from __future__ import annotations

import pytest
import torch

from holdfast.integrations.megatron.optimizer import Trained, settle_step
from holdfast.integrations.megatron.pieces import ParameterPiece, Stored


class FusedAdam(torch.optim.Adam):
    """As those of Apex and Transformer Engine, it counts steps in its groups."""


def trained(kind: type[torch.optim.Adam], begin: int = 0, end: int = 8) -> Trained:
    """The elements from `begin` to `end` of a parameter whose halves are two stored tensors, as an optimizer steps them."""
    parameter = torch.nn.Parameter(torch.arange(8.0))
    pieces = (ParameterPiece("gate", (8,), (4,), (4,), 0), ParameterPiece("up", (8,), (4,), (4,), 4))
    part = parameter.detach()[begin:end].clone().requires_grad_()
    optimizer = kind([part])
    return Trained(Stored(parameter, "fc1", pieces), optimizer, 0, part, begin, True)


@pytest.mark.parametrize(("begin", "end", "gate", "up"), [(0, 8, 4, 4), (2, 5, 2, 1), (4, 8, 0, 4), (0, 3, 3, 0)])
def test_every_stored_tensor_has_its_part_or_an_empty_one(begin: int, end: int, gate: int, up: int) -> None:
    one = trained(torch.optim.Adam, begin, end)
    found = one.cut(one.stepped)
    assert {name: sum(part.tensor.numel() for part in parts) for name, parts in found.items()} == {"gate": gate, "up": up}
    assert all(len(parts) == 1 and parts[0].shape == (8,) for parts in found.values())


@pytest.mark.parametrize(
    ("kind", "of_group", "of_parameter", "expected"),
    [
        (torch.optim.Adam, 7, None, (7, 7.0)),
        (torch.optim.Adam, None, torch.tensor(5.0), (None, 5.0)),
        (FusedAdam, None, torch.tensor(5.0), (5, None)),
        (FusedAdam, 7, None, (7, None)),
    ],
)
def test_steps_are_counted_where_the_optimizer_looks(
    kind: type[torch.optim.Adam], of_group: int | None, of_parameter: torch.Tensor | None, expected: tuple[object, object]
) -> None:
    """What was saved by an optimizer that counts elsewhere is not lost: Adam would correct its moments wrongly."""
    one = trained(kind)
    kept = {"exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
    one.optimizer.state[one.stepped] = kept | ({"step": of_parameter} if of_parameter is not None else {})
    if of_group is not None:
        one.optimizer.param_groups[0]["step"] = of_group
    settle_step(one)
    assert (one.optimizer.param_groups[0].get("step"), one.optimizer.state[one.stepped].get("step")) == expected
