"""Optimizer state that is not cut as its parameters are: saved by two ranks, restored by one, two and four."""

from __future__ import annotations

import json

import pytest

from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon
from tests.torchruns import launch

WORKER = "tests.distributed.shared_state_worker"
daemon = own_daemon(listen="none")


def run(daemon: RunningDaemon, ranks: int, *steps: dict[str, object]) -> None:
    launch(ranks, WORKER, str(daemon.socket), json.dumps(steps))


@pytest.mark.parametrize("kind", ["lists", "objects", "rows"])
def test_under_fsdp(daemon: RunningDaemon, kind: str) -> None:
    """Lists of DTensors, objects of a registered class, and declared rows: training goes on as if it had not stopped."""
    saved = {"run": kind, "kind": kind, "mesh": "fsdp", "exact": 2}
    back = saved | {"do": "restore"}
    run(daemon, 2, saved | {"do": "save"}, back, back | {"stepped": True})
    run(daemon, 1, back | {"mesh": "plain"})
    run(daemon, 4, back)
    if kind != "rows":  # which are all on every rank where columns are cut
        run(daemon, 2, back | {"mesh": "tp", "exact": 0})


def test_state_of_own_parameters_only(daemon: RunningDaemon) -> None:
    """Each rank of any world goes on with the state of what it steps; later saves have that of the rank that stepped."""
    saved = {"run": "owners", "kind": "owners", "mesh": "ddp", "exact": 2}
    back = saved | {"do": "restore"}
    run(daemon, 2, saved | {"do": "save"}, back)
    run(daemon, 1, back)
    run(daemon, 4, back)


def test_undeclared_parts_are_refused(daemon: RunningDaemon) -> None:
    """Statistics of the rows that a rank has look like whole ones, and differ."""
    run(daemon, 2, {"run": "undeclared", "kind": "undeclared", "mesh": "fsdp", "do": "save"})
