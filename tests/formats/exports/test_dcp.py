"""A directory that torch.distributed.checkpoint loads: all groups, the chosen keys, and what is said about the rest.

tests/formats/foreign/dcp has the files themselves.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.exports import dcp as exports_dcp
from holdfast_formats.exports.plan import ExportOptions
from tests.formats.exports.sources import llama, made, trained, values_of, write

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


@pytest.mark.parametrize("options", [ExportOptions(layout="megatron"), ExportOptions(weights="ema")])
def test_what_is_refused(tmp_path: Path, options: ExportOptions) -> None:
    """A layout that does not exist, and a choice that it does not offer."""
    source = made(tmp_path / "step", GROUPS).source
    with pytest.raises(InvalidRequest):
        exports_dcp.plan(source, options)
