"""Full-precision copies that are hard to tell: flat, nested, of NaN or zeros, remainders of bits, or in an attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save
from tests.client.state.test_masters import Kept, Made, in_odd_key, in_optimizer, precise, weights


def kept_of(state: Made) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(parameter, state["optim"].state[parameter]) for parameter in state["model"].parameters()]


def spoilt(seed: int, value: float) -> Made:
    """One weight, its copy and its moment are of this value alone."""
    state = in_odd_key(seed)
    parameter, kept = kept_of(state)[0]
    for tensor in (parameter.data, kept["p_hi"], kept["exp_avg"]):
        tensor.fill_(value)
    return state


def flat(seed: int) -> Made:
    state = in_odd_key(seed)
    for _, kept in kept_of(state):
        kept["p_hi"] = kept["p_hi"].reshape(-1)
    return state


def flat_with_a_usual_key(seed: int) -> Made:
    state = in_optimizer(seed)
    for _, kept in kept_of(state):
        kept["master_param"] = kept["master_param"].reshape(-1)
    return state


def nested(seed: int) -> Made:
    state = in_odd_key(seed)
    for _, kept in kept_of(state):
        kept["p_hi"] = {"parts": [kept["p_hi"]]}
    return state


def copy_in(kept: dict[str, Any]) -> torch.Tensor:
    copy = kept.get("p_hi", kept.get("master_param"))
    found: torch.Tensor = copy["parts"][0] if isinstance(copy, dict) else copy
    return found


MAKERS = [
    lambda seed: spoilt(seed, float("nan")),
    lambda seed: spoilt(seed, 0.0),
    lambda seed: spoilt(seed, 1.0),
    flat,
    flat_with_a_usual_key,
    nested,
]


@pytest.mark.parametrize("make", MAKERS)
def test_they_are_refused_or_set_all_alike(make: Callable[[int], Made]) -> None:
    """No copy stays behind because its values, or its form, tell nothing; moments stay what they were."""
    checkpoint, live = save(in_odd_key(1), ("model", "extra")), make(2)
    moments = [kept["exp_avg"].clone() for _, kept in kept_of(live)]
    with pytest.raises(StateMismatch, match="4 full-precision masters"):
        restore(checkpoint, live, groups=["model"])
    restore(checkpoint, live, groups=["model"], from_model="from-model")
    for (parameter, kept), moment in zip(kept_of(live), moments, strict=True):
        assert torch.equal(copy_in(kept).view(parameter.shape), parameter.float())
        assert torch.equal(kept["exp_avg"].nan_to_num(), moment.nan_to_num())


def test_remainders_of_bits_are_not_set_from_weights() -> None:
    """As Transformer Engine stores them: 16 bits that belong below the weight are no float32(weight)."""
    saved, live = in_optimizer(1), in_optimizer(2)
    for state in (saved, live):
        for parameter, kept in kept_of(state):
            kept["master_param"] = torch.full_like(parameter, 77, dtype=torch.int16)
    with pytest.raises(StateMismatch, match=r"0\.weight is of torch\.int16, which cannot hold"):
        restore(save(saved), live, groups=["model"], from_model="from-model")
    assert all(kept["master_param"].eq(77).all() for _, kept in kept_of(live))


def test_shards_with_a_key_of_their_own() -> None:
    """What an `OptimizerShards` hands out is compared too."""

    def made(seed: int) -> Made:
        model = weights(seed)
        named = dict(model.named_parameters())
        kept = {name: {"p_hi": precise(one), "exp_avg": torch.ones_like(one).float()} for name, one in named.items()}
        optim = OptimizerShards(groups=lambda: [{"params": [*named]}], state=lambda: kept, install=lambda g, v: None)
        return {"model": model, "optim": optim, "kept": Kept(kept)}

    checkpoint, live = save(made(1)), made(2)
    with pytest.raises(StateMismatch, match="4 full-precision masters"):
        restore(checkpoint, live, groups=["model"])
    restore(checkpoint, live, groups=["model"], from_model="from-model")
    for name, parameter in live["model"].named_parameters():
        assert torch.equal(live["kept"].kept[name]["p_hi"], parameter.float())
        assert live["kept"].kept[name]["exp_avg"].eq(1).all()


class FusedLike(torch.optim.SGD):
    """As apex's FusedAdam(master_weights=True): copies in an attribute of which no `state_dict()` tells."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups_master = [
            {"params": [p.detach().clone().float() for p in group["params"]]} for group in self.param_groups
        ]
        self.table = {"codes": torch.linspace(0, 1, 12)}


def test_copies_in_an_attribute_are_refused_or_stored_as_masters() -> None:
    """They would be lost, and the first step after a restore would undo it. Other tensors of an optimizer are its own."""
    model = weights(1)
    optim = FusedLike(model.parameters())
    with pytest.raises(InvalidRequest, match="FusedLike has full-precision copies of its parameters in param_groups_master"):
        TrainState({"model": model, "optim": optim}, 0, 1)
    copies = optim.param_groups_master[0]["params"]
    named = {name: copy for (name, _), copy in zip(model.named_parameters(), copies, strict=True)}
    snapshot = TrainState({"model": model, "optim": optim, "master": named}, 0, 1).snapshot()
    assert "master/0.weight" in {leaf.path for leaf in snapshot.leaves}
    optim.param_groups_master = []
    TrainState({"model": model, "optim": optim}, 0, 1)
