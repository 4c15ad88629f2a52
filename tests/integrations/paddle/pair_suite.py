"""The adapter's exam in two ranks, which may be those of Paddle's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.integrations.environments import TOP
from tests.integrations.recording import RECORD
from tests.integrations.resuming import Outcome, Rank, assert_equal, outcome, settings, start
from tests.suites.adapter_suite import AdapterSuite

SCRIPT = Path(__file__).with_name("launched.py")
# Most of a start is to import Paddle, and more so PaddleFormers.
fork = partial(start, kind="paddle")
fork_trainer = partial(start, kind="paddleformers")


class PairSuite(AdapterSuite):
    """What the other rank did is compared too: its rows, losses and end."""

    START = staticmethod(fork)

    def check(self, whole: Outcome, work: Path) -> None:
        assert_equal(outcome(work.parent / "whole" / "record-1.jsonl"), outcome(work / "record-1.jsonl"))


def launch(module: str, arguments: Sequence[str], work: Path, world: int, die_at: int = -1) -> list[Rank]:
    """`python -m paddle.distributed.launch` of the script, as `tests.integrations.resuming.start`. gloo is what it takes
    where there is no accelerator.
    """
    work.mkdir(parents=True, exist_ok=True)
    about = {**os.environ, **settings(die_at), RECORD: str(work / "record-{}.jsonl")}
    command = [sys.executable, "-m", "paddle.distributed.launch", "--host", "127.0.0.1", "--nproc_per_node", str(world)]
    command += ["--log_dir", str(work / "log"), str(SCRIPT), module, "--work", str(work), *arguments]
    with (work / "output-launcher.txt").open("ab") as output:
        return [subprocess.Popen(command, env=about, cwd=TOP, stdout=output, stderr=output, start_new_session=True)]
