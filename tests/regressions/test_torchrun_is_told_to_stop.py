"""The real torchrun gets SIGTERM, as a scheduler sends it: its ranks save one step, and end before they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.read.directory_root import published_steps
from tests.daemons import free_port, running, wait_until

LIMIT_S = 180.0
RANKS = 2


@pytest.mark.crash_slow
def test_torchrun_passes_the_signal_on_and_all_ranks_stop_at_one_step(tmp_path: Path) -> None:
    """Workers of the data loader are in the process groups that it signals; they are told to ignore it."""
    with running(tmp_path / "root") as daemon:
        words = ["--nnodes=1", f"--master-port={free_port()}", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "tests.regressions.torchrun_training"]
        about = os.environ | {"OMP_NUM_THREADS": "1"}
        with (tmp_path / "log").open("wb") as log:
            launcher = subprocess.Popen(
                [*command, str(daemon.socket), str(tmp_path), "deaf"], stdout=log, stderr=log, env=about
            )
        try:
            wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == RANKS or launcher.poll() is not None, LIMIT_S)
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(LIMIT_S)
        finally:
            launcher.kill()
            launcher.wait()
        steps = [(tmp_path / f"stopped-{rank}") for rank in range(RANKS)]
        assert all(step.exists() for step in steps), (tmp_path / "log").read_text()[-4000:]
        assert len({step.read_text() for step in steps}) == 1
        assert int(steps[0].read_text()) in published_steps(daemon.root, "torchrun")
