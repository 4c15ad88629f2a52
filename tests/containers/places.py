"""A daemon in a container of its own, or below systemd in one, that waits at named points to be killed; and its trainers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from holdfast_formats.staging.socket_paths import addressable
from tests.containers.projects import ASK_OWN, HEALTHY_S, SOCKET, TESTS, TOP, Project, project
from tests.daemons import wait_until
from tests.engine import BUILD_S, Engine

STOPS = "/tests/tests/crash/stops"
SERVES, ENDS = "holdfast_service: serving ", "the daemon stops"  # in the daemon's log, when it is ready and after a signal
BYTES = 1_000_000  # of a state
SYSTEMD_IMAGE = "localhost/holdfast-systemd"
DOCKERFILE = """
FROM holdfast
USER root
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd
COPY holdfast.service holdfast@.service /etc/systemd/system/
RUN useradd --create-home alice && useradd --system --create-home --home-dir /var/lib/holdfast trainer
RUN systemctl enable holdfast \\
    && systemctl mask systemd-udevd systemd-logind systemd-networkd getty.target console-getty.service
HEALTHCHECK NONE
ENTRYPOINT ["/lib/systemd/systemd"]
CMD []
"""
# What systemd needs to run services as this unit has it, without being a privileged container.
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_NICE")
MOUNTS = ("--tmpfs", "/run", "--tmpfs", "/run/lock", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup", "--volume", TESTS)


class Place(ABC):
    """Where a daemon runs. Its root and the marks of its points are directories of this machine."""

    def __init__(self, made: Engine, root: Path, marks: Path, inner_root: str, inner_marks: str) -> None:
        """`inner_…` is how the daemon and its trainers call these directories."""
        self.made, self.root, self.marks = made, root, marks
        self.inner_root, self.inner_marks = inner_root, inner_marks

    @abstractmethod
    def is_up(self) -> bool: ...

    @abstractmethod
    def log(self) -> str: ...

    @abstractmethod
    def inside(self, *command: str) -> list[str]:
        """The command line by which a command runs beside the daemon, as its user."""

    @abstractmethod
    def trainer(self, name: str, environment: dict[str, str], *command: str) -> list[str]:
        """The command line of a trainer that reads its input."""

    @abstractmethod
    def kill_trainer(self, name: str) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL for the whole container or unit."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it with its own grace, which may take as long."""

    @abstractmethod
    def upgrade(self) -> None:
        """Replace it by another one, as at an upgrade."""

    @abstractmethod
    def start(self) -> None: ...

    def arm(self, point: str) -> None:
        """The next process that gets to this point waits there."""
        for name in ("go", "hit"):
            (self.marks / name).unlink(missing_ok=True)
        (self.marks / "armed").write_text(point)

    def wait_for_a_victim(self) -> None:
        wait_until(lambda: (self.marks / "hit").exists(), HEALTHY_S)
        (self.marks / "armed").unlink()

    def let_go(self) -> None:
        (self.marks / "go").touch()

    def while_it_stops(self, how: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Begin to stop it, do something once the daemon has heard of that, and let it go; returns when it has stopped."""
        stopping = threading.Thread(target=how)
        stopping.start()
        try:
            wait_until(lambda: ENDS in self.log().rpartition(SERVES)[2] or not stopping.is_alive(), HEALTHY_S)
            if then is not None:
                then()
        finally:
            self.let_go()
            stopping.join()

    def ask(self, path: str) -> list[dict[str, Any]]:
        answer = json.loads(self.made.run(*self.inside("python", "-c", ASK_OWN, path)))
        return list(answer["items"])

    def settle(self) -> None:
        """No save is in progress, and every checkpoint was read back."""
        self.made.run(*self.inside("holdfast", "wait", "--idle", "--timeout", f"{HEALTHY_S:.0f}"))


class InContainer(Place):
    """The daemon of docker-compose.yml."""

    def __init__(self, run: Project, directory: Path) -> None:
        super().__init__(run.made, directory / "data", directory / "marks", "/data", "/marks")
        self._run, self._directory = run, directory
        self.start()

    def is_up(self) -> bool:
        with socket.socket(socket.AF_UNIX) as asking, addressable(self._directory / "socket" / Path(SOCKET).name) as name:
            try:
                asking.connect(name)
            except OSError:
                return False
            return True

    def log(self) -> str:
        """Empty for a container that was just replaced."""
        command, known = ["docker", "logs", self._container], self.made.environment
        ended = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
        return ended.stdout + ended.stderr if ended.returncode == 0 else ""

    def inside(self, *command: str) -> list[str]:
        return ["docker", "exec", self._container, *command]

    def trainer(self, name: str, environment: dict[str, str], *command: str) -> list[str]:
        mounts = [f"{self._directory / one}:{at}" for one, at in (("data", "/data:ro"), ("socket", "/run/holdfast"))]
        mounts += [TESTS, f"{self.marks}:/marks"]
        words = [word for mount in mounts for word in ("--volume", mount)]
        words += [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        started = ["docker", "run", "--rm", "--interactive", "--no-healthcheck", "--name", name, *words]
        return [*started, "--entrypoint", command[0], "holdfast", *command[1:]]

    def kill_trainer(self, name: str) -> None:
        self.made.docker("kill", name)

    def signal_daemon(self, number: int) -> None:
        """A signal for the daemon below the first process."""
        first = int(self.made.docker("inspect", "--format", "{{.State.Pid}}", self._container))
        (daemon,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        os.kill(int(daemon), number)

    def kill(self) -> None:
        self.made.docker("kill", self._container)

    def stop(self) -> None:
        self.made.docker("stop", self._container)  # with the grace of the file

    def upgrade(self) -> None:
        self._run.run("up", "--detach", "--force-recreate", "holdfast")

    def start(self) -> None:
        self._run.run("up", "--detach", "holdfast")
        self._container = self._run.run("ps", "--quiet", "holdfast").strip()


class BelowSystemd(Place):
    """The daemon of deploy/holdfast.service, and its trainers in the same container."""

    def __init__(self, made: Engine, container: str, directory: Path) -> None:
        home = "/var/lib/holdfast"
        super().__init__(made, directory / "checkpoints", directory / "marks", f"{home}/checkpoints", f"{home}/marks")
        self.container = container

    def is_up(self) -> bool:
        return self.shown("ActiveState") == "active"

    def shown(self, name: str) -> str:
        """A property of the unit; empty while systemd does not answer yet."""
        words = f"systemctl show --value --property {name} holdfast || true"
        return self.made.docker("exec", self.container, "sh", "-c", words).strip()

    def log(self) -> str:
        return self.systemd("journalctl", "--no-pager", "--output", "cat", "--unit", "holdfast")

    def systemd(self, *command: str) -> str:
        return self.made.docker("exec", self.container, *command)

    def inside(self, *command: str) -> list[str]:
        return ["docker", "exec", "--user", "trainer", self.container, *command]

    def trainer(self, name: str, environment: dict[str, str], *command: str) -> list[str]:
        words = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
        started = ["docker", "exec", "--interactive", "--user", "trainer", *words, self.container]
        return [*started, "sh", "-c", f'echo $$ > /tmp/{name} && exec "$@"', "sh", *command]

    def kill_trainer(self, name: str) -> None:
        self.systemd("sh", "-c", f"kill -9 $(cat /tmp/{name})")

    def kill(self) -> None:
        self.systemd("systemctl", "kill", "--signal", "KILL", "holdfast")

    def stop(self) -> None:
        self.systemd("systemctl", "stop", "holdfast")

    def upgrade(self) -> None:
        self.systemd("sh", "-c", "systemctl restart holdfast || true")  # a stop meanwhile cancels it

    def start(self) -> None:
        self.systemd("systemctl", "start", "holdfast")


class Rank:
    """A trainer of one rank (tests/crash/rank_process.py), and what it has said."""

    def __init__(self, place: Place, run: str, launch: str, steps: str, point: str = "", size: int = BYTES) -> None:
        self._place, self._name = place, f"{run}-{launch}"
        words = ["python", "-m", "tests.crash.rank_process", SOCKET, run, "0", "1", launch, steps, str(size)]
        environment = {"PYTHONPATH": "/tests"}
        if point:
            place.arm(point)
            environment = {"PYTHONPATH": f"/tests:{STOPS}", "CRASH_POINT": point, "CRASH_DIRECTORY": place.inner_marks}
        pipe = subprocess.PIPE
        command = place.trainer(self._name, environment, *words, place.inner_root)
        known = place.made.environment
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=known)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self.kill()
        self._ended()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.strip())

    def wait_for(self, *lines: str) -> str:
        """The first of these lines that it says."""

        def found() -> str | None:
            return next((line for line in list(self.said) for one in lines if line == one), None)

        try:
            wait_until(lambda: found() is not None or self._process.poll() is not None, HEALTHY_S)
        except AssertionError:
            raise AssertionError(f"{lines} not in {self.said}\n{self._place.log()[-4000:]}") from None
        line = found()
        assert line is not None, (self.said, self._place.log()[-4000:])
        return line

    def go(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"it has ended, after {self.said}\n{self._place.log()[-4000:]}") from None

    def kill(self) -> None:
        self._place.kill_trainer(self._name)
        self._ended()

    def end(self) -> None:
        """It ends by itself when its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._ended() == 0, self.said

    def _ended(self) -> int:
        self._reader.join()
        with self._process:  # closes its pipes
            return self._process.wait(HEALTHY_S)


@contextmanager
def in_container(made: Engine, directory: Path, points: str) -> Iterator[InContainer]:
    """A project whose daemon waits at these points, with a directory of this machine in the place of each volume."""
    daemon = yaml.safe_load((TOP / "docker-compose.yml").read_text())["services"]["holdfast"]
    daemon["image"] = "holdfast"
    places = {"data": "/data", "socket": "/run/holdfast", "marks": "/marks"}
    for name in places:
        (directory / name).mkdir(mode=0o700)
        os.chown(directory / name, 10001, 10001)
    daemon["volumes"] = [TESTS, *(f"{directory / name}:{at}" for name, at in places.items())]
    daemon["environment"] |= {"PYTHONPATH": STOPS, "CRASH_POINT": points, "CRASH_DIRECTORY": "/marks"}
    with project(made, "holdfast-test-points", directory, {"services": {"holdfast": daemon}}, {"disable": True}) as run:
        place = InContainer(run, directory)
        wait_until(place.is_up, HEALTHY_S)
        yield place


@contextmanager
def below_systemd(made: Engine, directory: Path, drop_in: str) -> Iterator[BelowSystemd]:
    """A container whose first process is systemd, with the unit's daemon ready in it; `drop_in` changes the unit."""
    for unit in ("holdfast.service", "holdfast@.service"):
        shutil.copy(TOP / "deploy" / unit, directory)
    (directory / "Dockerfile").write_text(DOCKERFILE)
    made.docker("build", "--network=host", "-t", SYSTEMD_IMAGE, str(directory), timeout_s=BUILD_S)
    home = directory / "home"
    (home / "marks").mkdir(parents=True)
    (directory / "test.conf").write_text(drop_in)
    mounts = [*MOUNTS, "--volume", f"{directory}/test.conf:/etc/systemd/system/holdfast.service.d/test.conf:ro"]
    mounts += ["--volume", f"{home}:/var/lib/holdfast"]
    allowed = [word for name in CAPABILITIES for word in ("--cap-add", name)]
    unconfined = [word for kind in ("seccomp", "apparmor") for word in ("--security-opt", f"{kind}=unconfined")]
    container = made.docker("run", "--detach", *allowed, *unconfined, *mounts, SYSTEMD_IMAGE).strip()
    try:
        place = BelowSystemd(made, container, home)
        wait_until(place.is_up, HEALTHY_S)
        yield place
    finally:
        made.docker("rm", "--force", container)
