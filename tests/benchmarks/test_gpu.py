"""The GPU benchmark: what it says without a GPU, that all of it runs, and that a missed bar is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from holdfast.stage import cuda_copy


def run(**values: Any) -> dict[str, Any]:
    """A run that reaches every bar, but for what is given."""
    return {"limit": 1e10, "staging": 0.95e10, "step_s": 0.5, "step_with_save_s": 0.505, "exact": True} | values


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture) -> None:
    """Nothing is measured, and that is no failure."""
    assert gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, in the way of a device: every save is loaded and bit-exact, and the samples are JSON."""
    monkeypatch.setattr(cuda_copy, "KINDS", frozenset({"cpu"}))
    options = gpu._parser().parse_args(["--state-bytes", "4000000", "--runs", "2", "--matrix", "64"])
    found = gpu.measure(torch.device("cpu"), tmp_path, options)
    assert [sample["exact"] for sample in found["runs"]] == [True, True]
    assert len(gpu.summary(json.loads(json.dumps(found)))) == 3


@pytest.mark.parametrize("missed", [{"staging": 0.8e10}, {"step_with_save_s": 0.52}, {"exact": False}])
def test_a_missed_bar_is_told(missed: dict[str, Any]) -> None:
    """Each of the bars, broken alone, is the one that is named."""
    assert all(reached for *_, reached in gpu.summary({"runs": [run(), run(), run()]}))
    reached = [bar[-1] for bar in gpu.summary({"runs": [run(**missed)] * 3})]
    assert reached.count(False) == 1
