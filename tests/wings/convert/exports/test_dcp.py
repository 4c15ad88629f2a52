"""A directory that torch.distributed.checkpoint loads: all groups, the chosen keys, and what is said about the rest.

tests/wings/convert/foreign/dcp has the files themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.convert.exports import dcp as exports_dcp
from holdfast_service.wings.convert.exports.plan import ExportOptions
from tests.wings.convert.exports.sources import llama, made, trained, values_of, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WEIGHTS = llama(layers=1)
GROUPS = trained(WEIGHTS)
NAME = "model.norm.weight"


def test_torch_loads_it(tmp_path: Path) -> None:
    """Model in the dtype that was asked for, averages and moments as they are, by their keys."""
    source = made(tmp_path / "step", GROUPS, assets={"config.json": b"{}"}, ranks=values_of(list(WEIGHTS), ranks=2)).source
    plan = exports_dcp.plan(source, ExportOptions(dtype="F32"))
    out = write(source, plan, tmp_path / "out")
    state = {
        "model": {NAME: torch.zeros(8)},
        "ema": {NAME: torch.zeros(8)},
        "optimizer": {"state": {NAME: {"exp_avg": torch.zeros(8), "step": torch.zeros(())}}},
    }
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert np.array_equal(state["model"][NAME].numpy(), WEIGHTS[NAME].astype(np.float32))
    assert np.array_equal(state["ema"][NAME].numpy(), GROUPS["ema"][NAME])
    moments = state["optimizer"]["state"][NAME]
    assert np.array_equal(moments["exp_avg"].numpy(), GROUPS["optim"][f"{NAME}/exp_avg"]) and moments["step"] == 2
    assert "extra/loader" in {one.what for one in plan.left_out}
    assert any("converted from bfloat16 to float32" in note for note in plan.notes)
    assert (out / "config.json").read_bytes() == b"{}"


def test_only_the_model(tmp_path: Path) -> None:
    """The layout `plain` has the model's names alone, in its own dtype, and says what it has no place for."""
    source = made(tmp_path / "step", GROUPS).source
    plan = exports_dcp.plan(source, ExportOptions(layout="plain"))
    out = write(source, plan, tmp_path / "out")
    state = {NAME: torch.zeros(8, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert state[NAME].view(torch.uint16).numpy().tobytes() == WEIGHTS[NAME].view(ml_dtypes.bfloat16).tobytes()
    assert any(one.what.startswith("optim/") for one in plan.left_out)


def test_an_unknown_layout(tmp_path: Path) -> None:
    source = made(tmp_path / "step", GROUPS).source
    with pytest.raises(InvalidRequest):
        exports_dcp.plan(source, ExportOptions(layout="megatron"))


def test_masters_beside_the_model(tmp_path: Path) -> None:
    """The layout `fsdp` has every group of weights under its own key; the others say how to get them."""
    source = made(tmp_path / "step", GROUPS, ranks=values_of(list(WEIGHTS))).source
    plan = exports_dcp.plan(source, ExportOptions())
    out = write(source, plan, tmp_path / "out")
    state = {"master": {name: torch.zeros(array.shape) for name, array in WEIGHTS.items()}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert {name: held.numpy().tobytes() for name, held in state["master"].items()} == {
        name: array.tobytes() for name, array in GROUPS["master"].items()
    }
    assert not any("master" in one.what for one in plan.left_out)
    (lost,) = (
        one for one in exports_dcp.plan(source, ExportOptions(layout="torchtitan")).left_out if one.what == f"master/{NAME}"
    )
    assert "--weights master" in lost.reason


@pytest.mark.parametrize("layout", ["fsdp", "torchtitan", "plain"])
@pytest.mark.parametrize("group", ["master", "ema"])
def test_masters_as_the_model(tmp_path: Path, layout: str, group: str) -> None:
    """Chosen weights are the model's, bit for bit in their own dtype, in every layout, and the moments stay."""
    source = made(tmp_path / "step", GROUPS, ranks=values_of(list(WEIGHTS))).source
    plan = exports_dcp.plan(source, ExportOptions(weights=group, layout=layout))
    out = write(source, plan, tmp_path / "out")
    weights = {name: torch.zeros(array.shape) for name, array in WEIGHTS.items()}
    kind = "exp_avg"
    state = {
        "fsdp": {"model": weights, "optimizer": {"state": {NAME: {kind: torch.zeros(8)}}}},
        "torchtitan": {**weights, "optimizer": {f"state.{NAME}.{kind}": torch.zeros(8)}},
        "plain": dict(weights),
    }[layout]
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert {name: held.numpy().tobytes() for name, held in weights.items()} == {
        name: array.tobytes() for name, array in GROUPS[group].items()
    }
    keys = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert not any(key.startswith(f"{group}.") for key in keys)
    whats = {one.what for one in plan.left_out}
    assert "the model's own weights" in whats
    assert not any(what.startswith(f"{group}/") for what in whats)


def test_masters_of_an_optimizer_stay_in_its_state(tmp_path: Path) -> None:
    """An optimizer that keeps the masters itself finds them there, also if they are the exported weights."""
    ranks = values_of(list(WEIGHTS))
    document = json.loads(ranks[0]["optim"]["optimizer"])
    document["masters"] = {"master_param": list(WEIGHTS)}
    ranks[0]["optim"]["optimizer"] = json.dumps(document)
    source = made(tmp_path / "step", GROUPS, ranks=ranks).source
    out = write(source, exports_dcp.plan(source, ExportOptions(weights="master")), tmp_path / "out")
    state = {"model": {NAME: torch.zeros(8)}, "optimizer": {"state": {NAME: {"master_param": torch.zeros(8)}}}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    master = GROUPS["master"][NAME].tolist()
    assert state["model"][NAME].tolist() == state["optimizer"]["state"][NAME]["master_param"].tolist() == master


@pytest.mark.parametrize("layout", ["fsdp", "plain"])
def test_tied_tensors_and_values_of_modules(tmp_path: Path, layout: str) -> None:
    """torch loads every name of a state dict, and the extra state of its modules as values in it."""
    groups = {"model": {**WEIGHTS, "ranks/00000/fp8._extra_state/amax": np.ones(3, np.float32)}}
    value = '{"amax": {"$tensor": "ranks/00000/fp8._extra_state/amax"}, "steps": 3}'
    aliases, ranks = {"model": {"tied.weight": NAME}}, {0: {"model": {"fp8._extra_state": value}}}
    source = made(tmp_path / "step", groups, aliases=aliases, ranks=ranks).source
    plan = exports_dcp.plan(source, ExportOptions(dtype="F32", layout=layout))
    out = write(source, plan, tmp_path / "out")
    extra = {"amax": torch.zeros(3), "steps": 0}
    state = {"tied.weight": torch.zeros(8), NAME: torch.zeros(8), "fp8._extra_state": extra}
    wanted = {"model": state} if layout == "fsdp" else state
    dcp.load(wanted, checkpoint_id=out, no_dist=True)
    assert state["tied.weight"].tolist() == state[NAME].tolist() == WEIGHTS[NAME].astype(np.float32).tolist()
    assert (extra["amax"].tolist(), extra["steps"]) == ([1, 1, 1], 3)
    assert not any("extra_state" in one.what for one in plan.left_out)
    assert any(f"tied.weight = {NAME}" in note for note in plan.notes)
