"""An optimizer by names becomes torch's state dict by numbers, in the order of its groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_service.wings.convert.exports import torch_optimizers
from holdfast_service.wings.convert.exports.torch_optimizers import NumberedOptimizer
from tests.wings.convert.exports import sources

ONES = np.ones(2, np.float32)


def of(place: Path, document: Any, optim: dict[str, np.ndarray], **more: Any) -> NumberedOptimizer:
    documents = document if isinstance(document, list) else [document]
    values = {0: {"optim": {f"optim{n}" if n else "optim": json.dumps(one) for n, one in enumerate(documents)}}}
    arrays = {"model": {"a": ONES, "b": ONES, "c": ONES}, "optim": optim, **more.pop("groups", {})}
    return torch_optimizers.of(sources.made(place, arrays, ranks=values, **more).source)


def test_groups_count_through(tmp_path: Path) -> None:
    document = optimizer_state.document([(["c", "a"], {"lr": 0.5}), (["b"], {"lr": 0.25, "fused": True})])
    document |= {"state": {"b": {"step": 3}}, "masters": {"master_param": ["a"]}}
    found = of(tmp_path / "x", document, {"a/exp_avg": ONES, "c/exp_avg": ONES}, groups={"master": {"a": ONES}})
    groups = found.state_dict["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1], [2]]
    assert [(group["lr"], group["fused"], group["capturable"]) for group in groups] == [
        (0.5, None, False),
        (0.25, True, False),
    ]
    state = found.state_dict["state"]
    assert {number: set(kept) for number, kept in state.items()} == {
        0: {"exp_avg"},
        1: {"exp_avg", "master_param"},
        2: {"step"},
    }
    assert state[1]["exp_avg"].spec.name == "a/exp_avg" and state[2]["step"] == 3
    assert found.groups == {"optim", "master"} and found.path == "optim/optim"


def test_numbers_stay_as_they_are(tmp_path: Path) -> None:
    """Also of more than ten parameters, whose numbers have another order as texts."""
    names = list(map(str, range(12)))
    document = {**optimizer_state.document([(names[:3], {}), (names[3:], {})]), optimizer_state.NUMBERED: True}
    found = of(tmp_path / "x", document, {f"{name}/exp_avg": ONES for name in names})
    assert [group["params"] for group in found.state_dict["param_groups"]] == [[0, 1, 2], list(range(3, 12))]
    assert list(found.state_dict["state"]) == list(range(12))
    assert found.state_dict["state"][11]["exp_avg"].spec.name == "11/exp_avg"


@pytest.mark.parametrize(("optim", "fused"), [("adamw_torch_fused", True), ("adamw_torch", None), (None, None)])
def test_how_a_step_is_computed_is_in_the_trainers_arguments(tmp_path: Path, optim: str | None, fused: bool | None) -> None:
    """A fused step rounds differently, so the resumed Trainer must take it too."""
    arguments = b"no JSON" if optim is None else json.dumps({"optim": optim}).encode()
    found = of(tmp_path / "x", optimizer_state.document([(["a"], {})]), {}, assets={"training_args.json": arguments})
    assert found.state_dict["param_groups"][0]["fused"] is fused


@pytest.mark.parametrize(
    ("document", "kind", "said"),
    [
        ([], NoSuchResource, "no optimizer"),
        ([optimizer_state.document([(["a"], {})])] * 2, StateMismatch, "has 2 optimizers"),
        ({"groups": 1}, StateMismatch, "cannot be read"),
        ({**optimizer_state.document([(["a"], {})]), "$keys": ["groups"]}, StateMismatch, "cannot be read"),
        (
            {
                **optimizer_state.document([(["a"], {})]),
                "$keys": ["groups", "state", "masters", "kinds", "wrapped"],
                "wrapped": {"a": {}},
            },
            StateMismatch,
            "wrapper tensors",
        ),
    ],
)
def test_other_optimizers_are_refused(tmp_path: Path, document: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as refused:
        of(tmp_path / "x", document, {})
    assert "--as" in getattr(refused.value, "hint", "")
