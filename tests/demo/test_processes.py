"""The demo's processes: nobody survives a kill, and nobody else is touched."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from holdfast.demo.processes import (
    LaunchedJob,
    ProcessId,
    free_port,
    identify,
    is_alive,
    leaving_in_order,
)

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"


def wait_for_family(job: LaunchedJob, count: int) -> list[ProcessId]:
    deadline = time.monotonic() + 180
    while len(job.family) < count and time.monotonic() < deadline:
        job.poll()
        time.sleep(0.01)
    return list(job.family)


def test_a_killed_job_takes_children_of_other_sessions_along(tmp_path: Path) -> None:
    """torchrun gives each rank a session of its own, so a kill has to follow parentage."""
    with LaunchedJob([sys.executable, "-c", PARENT], tmp_path / "log") as job:
        family = wait_for_family(job, 2)
        assert job.kill() == 2
    assert len(family) == 2
    assert not any(is_alive(identity) for identity in family)


def test_leaving_the_block_kills_what_still_runs(tmp_path: Path) -> None:
    """An error in the demo leaves no trainer behind."""
    with LaunchedJob([sys.executable, "-c", SLEEP], tmp_path / "log") as job:
        (identity,) = wait_for_family(job, 1)
        assert is_alive(identity)
    assert not is_alive(identity)


def test_a_process_is_known_by_more_than_its_number() -> None:
    """A number that was given to another process later does not count as the same one."""
    me = identify(os.getpid())
    assert me is not None and is_alive(me)
    assert not is_alive(me._replace(started="0"))


def test_a_free_port_can_be_listened_at() -> None:
    """The port that is offered is not in use."""
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_sigterm_leaves_in_order_and_only_inside_the_block() -> None:
    """Inside, SIGTERM unwinds like an exception; afterwards it means what it meant before."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, leaving_in_order():
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
