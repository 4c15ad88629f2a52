"""A run whose rank dies."""

from __future__ import annotations

from tests.daemons import RunningDaemon
from tests.forked import Forked


def lose(daemon: RunningDaemon, run: str) -> None:
    """Save a step of a run, and kill its rank."""
    with Forked(["-m", "tests.crash.rank_process", daemon.socket, run, 0, 1, "launch", 1, 1000], talks=True) as rank:
        assert rank.stdout is not None
        while rank.stdout.readline().strip() != "committed 1":
            pass
        rank.kill()
