"""`holdfast bench`: limits of this machine, with whatever disk there is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.terminal import machine_limits
from holdfast.terminal.machine_limits import BLOCK_BYTES, Limits
from holdfast_formats.errors import InvalidRequest, NoSpace, StorageFailed


def test_everything_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    """Every limit is a rate, every step is told, and the directory is as it was."""
    told: list[str] = []
    found = machine_limits.measure(tmp_path, BLOCK_BYTES + 5, told.append)
    assert min(found[:5]) > 0
    assert len(told) == 6
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT is measured as it is."""
    monkeypatch.setattr(machine_limits, "_has_direct", lambda path: False)
    found = machine_limits.measure(tmp_path, BLOCK_BYTES)
    assert not found.direct and found.read > 0


def test_expectations_follow_from_the_slower_limit() -> None:
    """A slow digest holds up a fast disk, and the other way round."""
    fast_disk = machine_limits.expect(Limits(10e9, 1e9, 50e9, 50e9, 50e9, True), 10**9)
    slow_disk = machine_limits.expect(Limits(10e9, 50e9, 1e9, 1e9, 1e9, True), 10**9)
    assert fast_disk == slow_disk
    assert fast_disk.staged_s < fast_disk.durable_s
    busy = machine_limits.expect(Limits(10e9, 50e9, 1e9, 0.5e9, 1e9, True), 10**9)
    assert busy.busy_s == 2 * busy.durable_s == 2 * slow_disk.durable_s == 2 * slow_disk.busy_s


def test_the_processes_that_keep_the_cores_busy_end_with_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk fails meanwhile."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **options))
        return started[-1]

    def fails(_: int) -> None:
        if started:
            assert all(process.poll() is None for process in started)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(StorageFailed):
        machine_limits.measure(tmp_path, BLOCK_BYTES)
    assert len(started) == len(os.sched_getaffinity(0))
    assert all(process.poll() is not None for process in started)


def test_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few bytes, a full disk, a broken one; nothing is left behind."""
    with pytest.raises(InvalidRequest):
        machine_limits.measure(tmp_path, 1)
    for number, named in ((errno.ENOSPC, NoSpace), (errno.EIO, StorageFailed)):

        def fails(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", fails)
        with pytest.raises(named):
            machine_limits.measure(tmp_path, BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for people, a document for programs, an error for a directory that is none."""
    run = CliRunner()
    shown = run.invoke(app, ["bench", "--root", str(tmp_path), "--size-mib", "8"])
    assert shown.exit_code == 0 and "durable write" in shown.output and "137.4 GB" in shown.output
    args = ["bench", "--root", str(tmp_path), "--size-mib", "8", "--state-gib", "2", "--json"]
    made = json.loads(run.invoke(app, args).output)
    assert [one["bytes"] for one in made["expected"]] == [2 * 2**30]
    assert run.invoke(app, ["bench", "--root", str(tmp_path / "nope")]).exit_code == 2
    monkeypatch.chdir(tmp_path)
    assert json.loads(run.invoke(app, ["bench", "--size-mib", "8", "--json"]).output)["directory"] == str(tmp_path)
