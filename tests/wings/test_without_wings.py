"""The core works on one machine without its wings."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest
import torch

import holdfast_service
from tests.daemons import running
from tests.kit.ranks import World

ABSENT = frozenset({"cluster"})


def test_a_daemon_without_wings_saves_restores_and_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders are not there at all."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__", *(ABSENT if Path(folder).name == "wings" else ())}

    shutil.copytree(Path(holdfast_service.__file__).parent, tmp_path / "service" / "holdfast_service", ignore=left_out)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "service"))
    weights = torch.arange(4096, dtype=torch.float32)
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        saving = World(daemon, "run", [{"w": weights.clone()}, {"w": weights.clone()}])
        assert saving.save(1) == [None, None]
        saving.close()
        targets = [{"w": torch.zeros(4096)} for _ in range(2)]
        restoring = World(daemon, "run", targets, launch="b")
        assert restoring.restore() == [1, 1]
        restoring.close()
        assert all(torch.equal(target["w"], weights) for target in targets)
        answers = [msgspec.json.decode(urlopen(f"{daemon.url}/v1/{path}").read()) for path in ("runs", "nodes")]
        assert [len(answer["items"]) for answer in answers] == [1, 1] and answers[1]["items"][0]["live"]
