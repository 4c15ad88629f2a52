"""What the demo starts, and what it refuses to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from holdfast.demo import main
from holdfast.demo.processes import DemoDaemon
from holdfast.demo.story import RESUMED, UNINTERRUPTED, Stage, command


def test_every_launch_is_told_the_same(tmp_path: Path) -> None:
    """The runs that are compared differ in their names and places alone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        daemon = DemoDaemon("", tmp_path / "socket", tmp_path, process)
    stage = Stage(tmp_path, daemon, 90, Console())
    compared, killed = command(stage, UNINTERRUPTED), command(stage, RESUMED)
    assert {compared[n - 1] for n, (a, b) in enumerate(zip(compared, killed, strict=True)) if a != b} == {
        "--name",
        "--directory",
    }
    assert killed[killed.index("--device") + 1] == "cpu"
    assert command(stage._replace(device="cuda", ranks=1), RESUMED)[4:6] == ["--nproc-per-node", "1"]


def test_a_device_that_is_not_here_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started, and no directory is made."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(tmp_path / "out", device="cuda") == 2
    assert "no CUDA device" in capsys.readouterr().out and not (tmp_path / "out").exists()
