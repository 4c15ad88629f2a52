"""`holdfast bench restart`: a real trainer that is killed and started again, with its daemon and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.commands import bench
from holdfast.terminal import restart_times
from holdfast_formats.errors import InvalidRequest, StorageFailed


def test_both_restarts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory while the daemon is there, from the directory without it; nothing is left, not even a daemon."""
    monkeypatch.setattr(restart_times, "ROUNDS", 1)
    ran = CliRunner().invoke(app, ["bench", "restart", "--root", str(tmp_path), "--size-mib", "8", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.output)
    assert [one["source"] for one in told["starts"]] == ["slot", "directory"] and told["bytes"] == 8 * 2**20
    for one in told["starts"]:
        assert one["own"] == one["holdfast"] + one["restore"] > 0 and one["limit"] > 0
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _words(path)]


def _words(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    restart = restart_times.Restart(1.0, 0.4, 0.1, 0.6, 0.2, 0.01, "slot")
    bench._print_restarts(2**30, {"trainer killed": restart}, [0.25])
    shown = capsys.readouterr().out
    assert "trainer killed" in shown and "600 ms" in shown and "250 ms" in shown and "1.1 GB" in shown


@pytest.mark.parametrize(
    "words",
    [["elsewhere"], ["restart", "--state-gib", "2"], ["restart", "--root", "s3://bucket/p"], ["restart", "--size-mib", "1"]],
)
def test_what_is_refused(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 2


def test_too_few_bytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too few"):
        restart_times.measure(tmp_path, 2**19)


def test_a_start_that_restores_nothing(tmp_path: Path) -> None:
    """Is no measurement, and is told."""
    with pytest.raises(StorageFailed, match="restored nothing"):
        restart_times._restart(tmp_path / "root", 2**20)
    restart_times._end_daemon(tmp_path / "root")


def test_a_trainer_that_fails(tmp_path: Path) -> None:
    """Its last words are told."""
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(StorageFailed, match="the trainer ended"):
        restart_times._train(tmp_path / "root", 8 * 2**20)
