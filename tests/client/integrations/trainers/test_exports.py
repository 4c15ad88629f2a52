"""Exports of a trainer's checkpoints by its daemon; tests/integrations has those of real Trainers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.integrations.trainers import exports
from holdfast.integrations.trainers.exports import Exports
from tests.daemons import RunningDaemon
from tests.kit.daemons import daemon, run

__all__ = ["daemon", "run"]


def made(daemon: RunningDaemon, run: str, place: Path, kind: str = "copy", limit: int | None = None) -> Exports:
    return Exports(run, daemon.root, {"at": daemon.root, "exports": {kind: place}}, limit, lambda: 2)


def saved(daemon: RunningDaemon, run: str, *steps: int) -> None:
    with Checkpointer(run, {"model": torch.nn.Linear(2, 2)}, at=daemon.root) as checkpointer:
        for step in steps:
            checkpointer.save(step).result()


def test_older_exports_than_the_limit_are_removed(daemon: RunningDaemon, run: str, tmp_path: Path) -> None:
    saved(daemon, run, 2, 4, 6, 8)
    for step in (2, 4, 6, 8):
        one = made(daemon, run, tmp_path, "hf", limit=2)
        one.of(step)
        one.close(wait=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]


def test_the_end_waits_no_longer_for_an_export_that_stands_still(
    daemon: RunningDaemon, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(daemon, run, 2)
    monkeypatch.setattr(exports, "STILL_S", 0.0)
    one = made(daemon, run, tmp_path, "hf")
    one.of(2)
    one.close(wait=True)
    assert f"an export of {run} has written nothing for 0 s" in caplog.text


def test_an_export_that_fails_is_a_warning(
    daemon: RunningDaemon, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(daemon, run, 2)
    one = made(daemon, run, tmp_path, "peft")
    one.of(2)
    one.close(wait=True)
    assert f"{run}@2 was not exported as peft" in caplog.text
