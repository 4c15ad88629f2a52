"""A checkpoint that DeepSpeed wrote is imported, and an attached engine goes on from it as the one that wrote it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.daemons import RunningDaemon
from tests.integrations.deepspeed.going_on import FIRST, STEPS
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run
from tests.torchruns import launch

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")
daemon = own_daemon()


@pytest.mark.parametrize(("stage", "kind"), [(1, "fp32"), (1, "bf16"), (2, "bf16"), (2, "fp16"), (3, "bf16")])
def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path, stage: int, kind: str) -> None:
    """Losses of both ranks, weights, masters and moments, the schedule, counters and the caller's state."""
    how = ("--stage", str(stage), "--kind", kind, "--saves", str(tmp_path / "saves"))
    launch(2, "tests.integrations.deepspeed.going_on", *how, "--told", str(tmp_path / "original"))
    result = call("import", tmp_path / "saves", f"{run}@{FIRST}", "--root", daemon.root)
    assert result.exit_code == 0, result.output
    how = (*how[:-1], str(tmp_path / "again"), "--root", str(daemon.root), "--run", run)
    launch(2, "tests.integrations.deepspeed.going_on", *how, "--told", str(tmp_path / "resumed"))
    for rank in range(2):
        original, resumed = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("original", "resumed"))
        assert (original["began"], resumed["began"], resumed["client_state"]) == (0, FIRST, {"epoch": 2})
        assert len(resumed["losses"]) == STEPS - FIRST and resumed["losses"] == original["losses"][FIRST:]
        assert (resumed["rates"], resumed["samples"]) == (original["rates"], original["samples"])
    wanted, found = (torch.load(tmp_path / f"{name}.pt") for name in ("original", "resumed"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
