"""A training exported as `checkpoint-N` has what the Trainer's own files had, tensor for tensor and value for value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast_formats.errors import InvalidRequest, NoSuchResource
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.exports.plan import ExportOptions, ExportPlan
from holdfast_service.wings.convert.exports.source import ExportSource, of_listing
from holdfast_service.wings.convert.exports.trainer import KIND
from holdfast_service.wings.convert.foreign.trainers.trainer import KIND as FOREIGN
from tests.wings.convert.exports import sources
from tests.wings.convert.foreign.trainers import directories


def converted(place: Path) -> ExportSource:
    files = hub_snapshot.opened(place)
    return of_listing(files, FOREIGN.read(files, ReadOptions()))


def planned(source: ExportSource) -> ExportPlan:
    return KIND.plan(source, ExportOptions())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.tolist() == list(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    """Optimizer, scheduler, scaler, random states and trainer_state.json; torch loads all of it without running code."""
    place = directories.trainer(tmp_path / "in")
    source = converted(place)
    plan = planned(source)
    out = sources.write(source, plan, tmp_path / "out")
    for name in ("optimizer.pt", "scheduler.pt", "scaler.pt"):
        assert same(torch.load(place / name), torch.load(out / name, weights_only=True))
    assert same(
        torch.load(place / "rng_state.pth", weights_only=False), torch.load(out / "rng_state.pth", weights_only=True)
    )
    assert (out / "trainer_state.json").read_bytes() == (place / "trainer_state.json").read_bytes()
    assert same(load_file(place / "model.safetensors"), load_file(out / "model.safetensors"))
    assert not (out / "training_args.bin").exists() and plan.left_out == ()


def test_each_rank_has_its_file(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path / "in", ranks=2)
    states = torch.load(place / "rng_state_1.pth", weights_only=False)
    numpy = (*states["numpy"][:2], 17, 1, 0.25)
    torch.save({**states, "numpy": numpy, "cuda": [torch.ones(16, dtype=torch.uint8)]}, place / "rng_state_1.pth")
    out = sources.write(source := converted(place), planned(source), tmp_path / "out")
    for name in ("rng_state_0.pth", "rng_state_1.pth"):
        assert same(torch.load(place / name, weights_only=False), torch.load(out / name, weights_only=True))


def test_an_adapter(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path / "in", weights=False)
    weights = {"base_model.model.q.lora_A.weight": torch.ones(2, 2)}
    save_file(weights, place / "adapter_model.safetensors", {"format": "pt"})
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    out = sources.write(source := converted(place), planned(source), tmp_path / "out")
    assert same(load_file(out / "adapter_model.safetensors"), weights)
    assert same(torch.load(place / "optimizer.pt"), torch.load(out / "optimizer.pt"))
    assert (out / "adapter_config.json").exists()


def test_a_checkpoint_of_another_loop(tmp_path: Path) -> None:
    """Its step makes a trainer_state.json; what has no place in a Trainer's files is named."""
    weights = {"w": np.ones((2, 3), np.float32)}
    values = sources.values_of(["w"])
    schedule = {"last_epoch": 5, "milestones": {"$counter": [[4, 1]]}}
    values[0]["extra"] |= {"lr_scheduler": json.dumps(schedule), "seen": json.dumps({"at": {"$tensor": "seen/at"}})}
    arrays = sources.trained(weights) | {"extra": {"seen/at": np.ones(3, np.float32), "lone": np.ones(2, np.float32)}}
    source = sources.made(tmp_path / "step", arrays, ranks=values).source
    plan = planned(source)
    out = sources.write(source, plan, tmp_path / "out")
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 5
    assert torch.load(out / "scheduler.pt", weights_only=True) == {"last_epoch": 5, "milestones": {4: 1}}
    state = torch.load(out / "optimizer.pt", weights_only=True)
    assert same(state["state"][0]["exp_avg"], torch.from_numpy(arrays["optim"]["w/exp_avg"]))
    assert state["param_groups"][0]["betas"] == sources.BETAS and state["param_groups"][0]["params"] == [0]
    left = {one.what.partition(" (")[0] for one in plan.left_out}
    assert {"group ema", "group master", "extra/loader", "extra/seen", "extra/lone"} <= left
    assert any("no random states" in note for note in plan.notes)


def test_what_a_trainer_cannot_resume_from(tmp_path: Path) -> None:
    place = directories.trainer(tmp_path / "in", scheduler=None)
    with pytest.raises(NoSuchResource, match="no learning-rate scheduler") as refused:
        planned(converted(place))
    assert "--as hf" in refused.value.hint
    for options in (ExportOptions(dtype="BF16"), ExportOptions(weights="ema"), ExportOptions(layout="fsdp")):
        with pytest.raises(InvalidRequest, match="exported unchanged"):
            KIND.plan(converted(place), options)
