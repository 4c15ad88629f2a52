"""What torchtitan itself saves by DCP is imported, and our manager goes on from it as torchtitan's own training did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.integrations.torchtitan_state import fusing_program
from tests.daemons import RunningDaemon
from tests.integrations.torchtitan import tiny
from tests.integrations.torchtitan.going_on import FIRST, STEPS
from tests.kit.commands import call
from tests.kit.daemons import own_daemon, run
from tests.torchruns import launch

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")
daemon = own_daemon()
SCRIPT = "tests.integrations.torchtitan.going_on"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_twenty_steps_are_equal(daemon: RunningDaemon, run: str, tmp_path: Path, ranks: int) -> None:
    """Losses and rows of each rank, weights, moments and the schedule."""
    launch(ranks, SCRIPT, "--work", str(tmp_path / "own"), "--told", str(tmp_path / "original"))
    source = tmp_path / "own" / "out" / "checkpoint" / f"step-{FIRST}"
    (tmp_path / "fused.toml").write_text(str(fusing_program([tiny.model_config().build()])))
    program = ("--program", tmp_path / "fused.toml")
    result = call("import", source, f"{run}@{FIRST}", "--root", daemon.root, *program)
    assert result.exit_code == 0, result.output
    more = ("--root", str(daemon.root), "--run", run)
    launch(ranks, SCRIPT, "--work", str(tmp_path / "again"), "--told", str(tmp_path / "resumed"), *more)
    for rank in range(ranks):
        original, resumed = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("original", "resumed"))
        assert (original["began"], resumed["began"], len(resumed["losses"])) == (0, FIRST, STEPS - FIRST)
        for what in ("losses", "rows"):
            assert resumed[what] == original[what][FIRST:]
        assert (resumed["tensors"], resumed["schedule"]) == (original["tensors"], original["schedule"])
