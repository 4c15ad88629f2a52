"""deploy/holdfast.service and its template under a real systemd, the first process of a container (make engine)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.places import BelowSystemd, Rank, below_systemd
from tests.containers.projects import HEALTHY_S
from tests.daemons import wait_until
from tests.engine import Engine

# A save of 30 MB is staged for 15 s, longer than a daemon without progress is waited for.
SLOW = """
[Service]
Environment=HOLDFAST_WRITE_BYTES_PER_SECOND=2000000
WatchdogSec=8
TimeoutStopSec=8
"""
pytestmark = pytest.mark.engine


@pytest.fixture
def unit(made: Engine, tmp_path: Path) -> Iterator[BelowSystemd]:
    with below_systemd(made, tmp_path, SLOW) as place:
        yield place


def committed(unit: BelowSystemd) -> list[Path]:
    return list(unit.root.glob("*/checkpoints/step-*/COMMIT"))


def staged(unit: BelowSystemd) -> None:
    """A rank has sealed a save, and was killed."""
    rank = Rank(unit, "r", "launch", "1", size=30_000_000)
    rank.wait_for("sealed 1")
    rank.kill()


def test_a_staged_save_outlives_trainer_and_daemon_under_systemd(unit: BelowSystemd) -> None:
    """Also where systemd does not say in $FDSTORE that it keeps descriptors, as before 254: its store has the memory, and
    the daemon that it starts next commits the save.
    """
    staged(unit)
    assert unit.shown("NFileDescriptorStore") == "1" and committed(unit) == []
    unit.kill()
    wait_until(lambda: len(committed(unit)) == 1, HEALTHY_S)
    assert unit.shown("NRestarts") == "1"


def test_a_frozen_daemon_is_started_again_and_the_save_is_written(unit: BelowSystemd) -> None:
    """Stopped by SIGSTOP, it sends no sign of life: the watchdog ends it, and the next one has the memory."""
    staged(unit)
    unit.systemd("systemctl", "kill", "--signal", "STOP", "--kill-who", "main", "holdfast")
    wait_until(lambda: len(committed(unit)) == 1, HEALTHY_S)
    assert unit.shown("NRestarts") == "1"
    assert "Watchdog timeout" in unit.log()


def test_a_stop_waits_for_the_save_beyond_its_limit_as_long_as_bytes_move(unit: BelowSystemd) -> None:
    """`systemctl stop` in mid-save returns when the save is committed, and the journal has said what it waited for."""
    staged(unit)
    unit.stop()
    assert len(committed(unit)) == 1 and unit.shown("Result") == "success"
    said = unit.log()
    assert "SIGTERM: the daemon stops" in said and "still stopping after" in said and "stopped after" in said
    assert "stopping: waiting for 1 save, 30 MB" in said


def test_each_user_has_a_daemon(unit: BelowSystemd) -> None:
    """The template unit runs as its user, whose socket no other user reaches."""
    unit.systemd("systemctl", "start", "holdfast@alice")
    socket = "/run/holdfast-alice/holdfast.sock"
    assert unit.systemd("stat", "--format", "%U %F", socket).strip() == "alice socket"
    assert unit.systemd("stat", "--format", "%a", "/run/holdfast-alice").strip() == "700"
    assert unit.systemd("stat", "--format", "%U", "/var/lib/holdfast-alice/checkpoints").strip() == "alice"
