"""deploy/holdfast.service under a real systemd, the first process of a container (make engine)."""

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
COPY holdfast.service /etc/systemd/system/
COPY slow.conf /etc/systemd/system/holdfast.service.d/
RUN useradd --system --create-home --home-dir /var/lib/holdfast trainer && systemctl enable holdfast \\
    && systemctl mask systemd-udevd systemd-logind systemd-networkd getty.target console-getty.service
HEALTHCHECK NONE
ENTRYPOINT ["/lib/systemd/systemd"]
CMD []
"""
SLOW = "[Service]\nEnvironment=HOLDFAST_WRITE_BYTES_PER_SECOND=2000000\n"  # a save is staged for long
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
    shutil.copy(TOP / "deploy" / "holdfast.service", tmp_path)
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


def test_a_staged_save_outlives_trainer_and_daemon_under_systemd(made: Engine, machine: str) -> None:
    """Also where systemd does not say in $FDSTORE that it keeps descriptors, as before 254: its store has the memory, and
    the daemon that it starts next commits the save.
    """
    made.docker("exec", machine, "sh", "-c", f"sleep 600 | {RANK.strip()} > /tmp/said & echo $! > /tmp/rank")
    wait_until(lambda: "sealed 1" in made.docker("exec", machine, "cat", "/tmp/said"), HEALTHY_S)
    made.docker("exec", machine, "sh", "-c", "kill -9 $(cat /tmp/rank)")
    assert shown(made, machine, "NFileDescriptorStore") == "1" and committed(made, machine) == []
    made.docker("exec", machine, "systemctl", "kill", "--signal", "KILL", "holdfast")
    wait_until(lambda: len(committed(made, machine)) == 1, HEALTHY_S)
    assert shown(made, machine, "NRestarts") == "1"
