"""A universal checkpoint of DeepSpeed: its files as torch reads them, and what is refused.

tests/integrations/deepspeed loads them with DeepSpeed, and trains on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.exports import deepspeed_universal
from holdfast_service.wings.convert.exports.plan import ExportOptions
from holdfast_service.wings.convert.exports.source import of_listing
from holdfast_service.wings.convert.foreign.deepspeed import kinds
from tests.wings.convert.exports.sources import llama, made, trained, values_of, write
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, read

WEIGHTS = llama(layers=1)
GROUPS = trained(WEIGHTS)
NAME = "model.norm.weight"
TAG = "global_step5_universal"


def _values(*groups: tuple[list[str], dict[str, Any]], **extra: Any) -> dict[int, Any]:
    document = optimizer_state.document(list(groups) or [(list(WEIGHTS), {"lr": 0.5, "betas": {"$tuple": [0.9, 0.95]}})])
    held = {"optim": {"optimizer": json.dumps(document)}}
    return {0: {**held, "extra": {key: json.dumps(value) for key, value in extra.items()}}}


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_the_files(tmp_path: Path) -> None:
    """Each parameter's master and moments whole, its steps, the groups for every stage, and the counters."""
    source = made(tmp_path / "step", GROUPS, step=5, ranks=_values(deepspeed={"counters": {"global_steps": 5}})).source
    exported = deepspeed_universal.plan(source, ExportOptions())
    out = write(source, exported, tmp_path / "out")
    assert (out / "latest_universal").read_text() == TAG
    place = out / TAG / "zero" / NAME
    assert sorted(path.name for path in place.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    for file, array in {
        "fp32.pt": GROUPS["master"][NAME],
        "exp_avg.pt": GROUPS["optim"][f"{NAME}/exp_avg"],
        "exp_avg_sq.pt": GROUPS["optim"][f"{NAME}/exp_avg_sq"],
    }.items():
        held = _load(place / file)
        assert held.keys() == {"param"} and held["param"].numpy().tobytes() == array.tobytes()
    assert torch.equal(_load(place / "step.pt"), torch.tensor(2.0))
    state = _load(out / TAG / "zero" / "optimizer_state.pt")
    assert state["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}]
    assert state["optimizer_state_dict"]["param_groups"] == state["param_groups"]
    assert torch.equal(state["optimizer_state_dict"]["state"][0]["step"], torch.tensor(2.0))
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = _load(out / TAG / name)
        assert (model["global_steps"], model["skipped_steps"], model["mp_world_size"]) == (5, 0, 1)
    assert [one.what for one in exported.left_out] == [f"group ema ({len(WEIGHTS)} tensors)"]
    assert any("no state of a scheduler" in note for note in exported.notes)


def test_what_no_optimizer_trains(tmp_path: Path) -> None:
    """Buffers and frozen weights are named; weights without a master are their own; groups keep their order."""
    groups = {**GROUPS, "master": {}, "model": {**WEIGHTS, "buffer": np.ones(3, np.float32)}}
    trains = [name for name in WEIGHTS if name != NAME]
    values = _values((trains[1:], {"lr": 0.5}), (trains[:1], {"lr": 0.25}))
    source = made(tmp_path / "step", groups, step=5, ranks=values).source
    exported = deepspeed_universal.plan(source, ExportOptions())
    out = write(source, exported, tmp_path / "out")
    left_out = {one.what for one in exported.left_out}
    assert {"model/buffer", f"model/{NAME}", f"optim/{NAME}/exp_avg"} <= left_out
    held = _load(out / TAG / "zero" / trains[0] / "fp32.pt")["param"]
    assert held.dtype == torch.float32 and held.tolist() == WEIGHTS[trains[0]].astype(np.float32).tolist()
    assert any("converted from the model" in note for note in exported.notes)
    assert any("different hyper-parameters" in note for note in exported.notes)
    assert [one["lr"] for one in _load(out / TAG / "zero" / "optimizer_state.pt")["param_groups"]] == [0.5, 0.25]


def test_tied_weights_have_both_names(tmp_path: Path) -> None:
    """DeepSpeed knows a parameter by its first name, whichever that is in its model."""
    source = made(tmp_path / "step", GROUPS, step=5, ranks=_values(), aliases={"model": {"tied.weight": NAME}}).source
    out = write(source, deepspeed_universal.plan(source, ExportOptions()), tmp_path / "out") / TAG / "zero"
    for file in ("fp32.pt", "exp_avg.pt", "step.pt"):
        assert (out / "tied.weight" / file).read_bytes() == (out / NAME / file).read_bytes()


def test_steps_of_fused_optimizers(tmp_path: Path) -> None:
    """They are a number of the group, and in no parameter's state."""
    optim = {name: array for name, array in GROUPS["optim"].items() if not name.endswith("/step")}
    values = _values((list(WEIGHTS), {"lr": 0.5, "step": 7}))
    source = made(tmp_path / "step", {**GROUPS, "optim": optim}, step=5, ranks=values).source
    out = write(source, deepspeed_universal.plan(source, ExportOptions()), tmp_path / "out")
    state = _load(out / TAG / "zero" / "optimizer_state.pt")
    assert state["param_groups"][0]["step"] == state["optimizer_state_dict"]["state"][0]["step"] == 7
    assert not (out / TAG / "zero" / NAME / "step.pt").exists()


@pytest.mark.parametrize(
    ("groups", "values", "kind", "said"),
    [
        ({}, {0: {}}, NoSuchResource, "one optimizer"),
        ({}, _values(([*WEIGHTS, "lost"], {})), StateMismatch, "'lost'"),
        ({"optim": {**GROUPS["optim"], f"{NAME}/row": np.ones(3, np.float32)}}, _values(), StateMismatch, f"{NAME}/row"),
        ({"optim": {**GROUPS["optim"], f"{NAME}/step": np.array(9, np.float32)}}, _values(), StateMismatch, "step counts"),
        ({}, _values((list(WEIGHTS), {"lr": {"$tensor": "groups/lr"}})), StateMismatch, "groups/lr"),
        ({"model": {**WEIGHTS, "a/b": np.ones(3, np.float32)}}, _values(([*WEIGHTS, "a/b"], {})), StateMismatch, "'a/b'"),
        ({"model": {**WEIGHTS, "..": np.ones(3, np.float32)}}, _values(([*WEIGHTS, ".."], {})), StateMismatch, "'..'"),
        ({"model": {**WEIGHTS, "n": np.ones(3, np.int64)}}, _values(([*WEIGHTS, "n"], {})), StateMismatch, "I64"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, groups: dict[str, Any], values: dict[int, Any], kind: type[CheckpointError], said: str
) -> None:
    source = made(tmp_path / "step", {**GROUPS, **groups}, step=5, ranks=values).source
    with pytest.raises(kind, match=said) as caught:
        deepspeed_universal.plan(source, ExportOptions())
    assert "--as" in caught.value.hint


def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    values = _values()
    document = json.loads(values[0]["optim"]["optimizer"])
    document["state"] = {NAME: {"odd": 1}}
    values[0]["optim"]["optimizer"] = json.dumps(document)
    source = made(tmp_path / "step", GROUPS, step=5, ranks=values).source
    with pytest.raises(StateMismatch, match="'odd'"):
        deepspeed_universal.plan(source, ExportOptions())


@pytest.mark.parametrize("options", [ExportOptions(layout="fsdp"), ExportOptions(weights="ema"), ExportOptions(dtype="F32")])
def test_options_that_do_not_apply(tmp_path: Path, options: ExportOptions) -> None:
    source = made(tmp_path / "step", GROUPS, ranks=values_of(list(WEIGHTS))).source
    with pytest.raises(InvalidRequest):
        deepspeed_universal.plan(source, options)


def test_an_import_gives_it_back(tmp_path: Path) -> None:
    """Weights (rounded masters), masters, moments and steps, bit for bit; and the export of that has the same tensors."""
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in GROUPS["master"].items()}
    groups = {**GROUPS, "model": rounded}
    source = made(tmp_path / "step", groups, step=5, ranks=_values()).source
    out = write(source, deepspeed_universal.plan(source, ExportOptions()), tmp_path / "out")
    listing = kinds.KIND.read(DirectoryFiles(out), ReadOptions())
    for group in ("master", "optim"):
        held = {key.name for key in listing.tensors if key.group == group}
        assert held == groups[group].keys()
        for name in held:
            assert read(out, listing, group, name).tobytes() == groups[group][name].tobytes(), name
    for name, array in rounded.items():
        assert read(out, listing, "model", name).tobytes() == array.tobytes(), name
    again = of_listing(DirectoryFiles(out), listing)
    second = write(again, deepspeed_universal.plan(again, ExportOptions()), tmp_path / "again")
    for path in sorted((out / TAG / "zero").rglob("*.pt")):
        if path.name != "optimizer_state.pt":
            assert (second / path.relative_to(out)).read_bytes() == path.read_bytes(), path
