"""deploy/holdfast.service and its template under a real systemd, the first process of a container (make engine)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.projects import HEALTHY_S, SOCKET, TESTS, TOP
from tests.daemons import wait_until
from tests.engine import BUILD_S, Engine

IMAGE = "localhost/holdfast-systemd"
DOCKERFILE = """
FROM holdfast
USER root
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd
COPY holdfast.service holdfast@.service /etc/systemd/system/
COPY slow.conf /etc/systemd/system/holdfast.service.d/
RUN useradd --create-home alice && useradd --system --create-home --home-dir /var/lib/holdfast trainer
RUN systemctl enable holdfast \\
    && systemctl mask systemd-udevd systemd-logind systemd-networkd getty.target console-getty.service
HEALTHCHECK NONE
ENTRYPOINT ["/lib/systemd/systemd"]
CMD []
"""
# A save of 30 MB is staged for 15 s, longer than a daemon without progress is waited for.
SLOW = """
[Service]
Environment=HOLDFAST_WRITE_BYTES_PER_SECOND=2000000
WatchdogSec=8
TimeoutStopSec=8
"""
# What systemd needs to run services as this unit has it, without being a privileged container.
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_NICE")
MOUNTS = ("--tmpfs", "/run", "--tmpfs", "/run/lock", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup", "--volume", TESTS)
RANK = f"""
setpriv --reuid trainer --regid trainer --clear-groups \\
    env PYTHONPATH=/tests python -m tests.crash.rank_process {SOCKET} r 0 1 launch 1 30000000
"""
pytestmark = pytest.mark.engine


@pytest.fixture
def machine(made: Engine, tmp_path: Path) -> Iterator[str]:
    """A container whose first process is systemd, with the unit's daemon ready in it."""
    for unit in ("holdfast.service", "holdfast@.service"):
        shutil.copy(TOP / "deploy" / unit, tmp_path)
    (tmp_path / "slow.conf").write_text(SLOW)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    made.docker("build", "--network=host", "-t", IMAGE, str(tmp_path), timeout_s=BUILD_S)
    allowed = [word for name in CAPABILITIES for word in ("--cap-add", name)]
    unconfined = [word for kind in ("seccomp", "apparmor") for word in ("--security-opt", f"{kind}=unconfined")]
    container = made.docker("run", "--detach", *allowed, *unconfined, *MOUNTS, IMAGE).strip()
    try:
        wait_until(lambda: shown(made, container, "ActiveState") == "active", HEALTHY_S)
        yield container
    finally:
        made.docker("rm", "--force", container)


def shown(made: Engine, machine: str, name: str) -> str:
    """A property of the unit; empty while systemd does not answer yet."""
    said = made.docker("exec", machine, "sh", "-c", f"systemctl show --value --property {name} holdfast || true")
    return said.strip()


def committed(made: Engine, machine: str) -> list[str]:
    place = "/var/lib/holdfast/checkpoints"
    return made.docker("exec", machine, "find", place, "-path", "*/checkpoints/step-*", "-name", "COMMIT").split()


def staged(made: Engine, machine: str) -> None:
    """A rank has sealed a save, and was killed."""
    made.docker("exec", machine, "sh", "-c", f"sleep 600 | {RANK.strip()} > /tmp/said & echo $! > /tmp/rank")
    wait_until(lambda: "sealed 1" in made.docker("exec", machine, "cat", "/tmp/said"), HEALTHY_S)
    made.docker("exec", machine, "sh", "-c", "kill -9 $(cat /tmp/rank)")


def journal(made: Engine, machine: str) -> str:
    return made.docker("exec", machine, "journalctl", "--no-pager", "--output", "cat", "--unit", "holdfast")


def test_a_staged_save_outlives_trainer_and_daemon_under_systemd(made: Engine, machine: str) -> None:
    """Also where systemd does not say in $FDSTORE that it keeps descriptors, as before 254: its store has the memory, and
    the daemon that it starts next commits the save.
    """
    staged(made, machine)
    assert shown(made, machine, "NFileDescriptorStore") == "1" and committed(made, machine) == []
    made.docker("exec", machine, "systemctl", "kill", "--signal", "KILL", "holdfast")
    wait_until(lambda: len(committed(made, machine)) == 1, HEALTHY_S)
    assert shown(made, machine, "NRestarts") == "1"


def test_a_frozen_daemon_is_started_again_and_the_save_is_written(made: Engine, machine: str) -> None:
    """Stopped by SIGSTOP, it sends no sign of life: the watchdog ends it, and the next one has the memory."""
    staged(made, machine)
    made.docker("exec", machine, "systemctl", "kill", "--signal", "STOP", "--kill-who", "main", "holdfast")
    wait_until(lambda: len(committed(made, machine)) == 1, HEALTHY_S)
    assert shown(made, machine, "NRestarts") == "1"
    assert "Watchdog timeout" in journal(made, machine)


def test_a_stop_waits_for_the_save_beyond_its_limit_as_long_as_bytes_move(made: Engine, machine: str) -> None:
    """`systemctl stop` in mid-save returns when the save is committed, and the journal has said what it waited for."""
    staged(made, machine)
    made.docker("exec", machine, "systemctl", "stop", "holdfast")
    assert len(committed(made, machine)) == 1 and shown(made, machine, "Result") == "success"
    said = journal(made, machine)
    assert "SIGTERM: the daemon stops" in said and "still stopping after" in said and "stopped after" in said
    assert "stopping: waiting for 1 save, 30 MB" in said


def test_each_user_has_a_daemon(made: Engine, machine: str) -> None:
    """The template unit runs as its user, whose socket no other user reaches."""
    made.docker("exec", machine, "systemctl", "start", "holdfast@alice")
    socket = "/run/holdfast-alice/holdfast.sock"
    assert made.docker("exec", machine, "stat", "--format", "%U %F", socket).strip() == "alice socket"
    assert made.docker("exec", machine, "stat", "--format", "%a", "/run/holdfast-alice").strip() == "700"
    assert made.docker("exec", machine, "stat", "--format", "%U", "/var/lib/holdfast-alice/checkpoints").strip() == "alice"
