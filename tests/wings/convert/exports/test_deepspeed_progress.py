"""Counters, scheduler, loss scale and `client_state`, from our adapter's values and from those of an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats.errors import StateMismatch
from holdfast_service.wings.convert.exports import deepspeed_progress
from holdfast_service.wings.convert.exports.deepspeed_progress import DeepSpeedProgress
from holdfast_service.wings.convert.foreign.pickle_writer import MadeObject
from tests.wings.convert.exports.sources import llama, made

SCALER = {
    "cur_scale": 64.0,
    "cur_iter": 3,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 4,
    "cur_hysteresis": 2,
}
COUNTERS = {"global_steps": 5, "global_samples": 20, "skipped_steps": 1}


def _read(tmp_path: Path, **extra: Any) -> DeepSpeedProgress:
    ranks = {0: {"extra": {key: json.dumps(value) for key, value in extra.items()}}}
    groups = {"model": llama(layers=1), "extra": {}}
    return deepspeed_progress.read(made(tmp_path / "step", groups, step=9, ranks=ranks).source)


def test_of_our_adapter(tmp_path: Path) -> None:
    kept = {"counters": COUNTERS, "loss_scale": SCALER, "tag": "x", "client_state": {"epoch": 2, "step": {"$tuple": [1]}}}
    found = _read(tmp_path, deepspeed=kept, scheduler={"last_batch_iteration": 4})
    assert found.counters == COUNTERS and found.client_state == {"epoch": 2, "step": (1,)}
    scaler = found.scale["loss_scaler"]
    assert isinstance(scaler, MadeObject) and scaler.state.keys() == SCALER.keys() | {"dtype"}
    states = found.model_states("F32")
    assert states["lr_scheduler"] == {"last_batch_iteration": 4} and states["epoch"] == 2 and states["global_steps"] == 5
    assert found.notes == found.left_out == ()


def test_of_another_trainer(tmp_path: Path) -> None:
    """Only the step is known. A fixed loss scale comes from the configuration."""
    found = _read(tmp_path, deepspeed={"loss_scale": {"cur_scale": 1.0}}, lr_scheduler={"last_epoch": 3})
    assert found.counters == {"global_steps": 9, "skipped_steps": 0}
    assert found.scheduler == {"last_epoch": 3} and not found.scale


def test_values_without_a_place(tmp_path: Path) -> None:
    found = _read(tmp_path, scheduler={"table": {"$tensor": "scheduler/table"}})
    assert [one.what for one in found.left_out] == ["extra/scheduler"] and "scheduler/table" in found.left_out[0].reason
    assert found.scheduler is None and "scheduler" in found.notes[0]


def test_a_source_without_a_step(tmp_path: Path) -> None:
    source = made(tmp_path / "step", {"model": llama(layers=1)}).source
    with pytest.raises(StateMismatch, match="the step of the training"):
        deepspeed_progress.read(source._replace(listing=source.listing._replace(step=None)))
