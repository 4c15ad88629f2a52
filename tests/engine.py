"""A container engine for tests: the one that DOCKER_HOST names, or a dockerd of their own, and an image to build from."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
BUILD_S = 1500.0
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
BASE = "localhost/holdfast-base:bookworm"
DEBIAN = "http://deb.debian.org/debian"
_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"


class Engine:
    """Commands of docker and docker-compose against one engine."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.environment = {**os.environ, "DOCKER_HOST": host, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def run(self, *command: str, timeout_s: float = 300.0, **environment: str) -> str:
        """What a command prints; fails the test with its output when it does not succeed."""
        known = {**self.environment, **environment}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=known, check=False)
        assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
        return ended.stdout

    def docker(self, *arguments: str, timeout_s: float = 300.0) -> str:
        return self.run("docker", *arguments, timeout_s=timeout_s)

    @property
    def answers(self) -> bool:
        asked = subprocess.run(["docker", "info"], capture_output=True, env=self.environment, check=False)
        return asked.returncode == 0


def missing() -> str | None:
    """Why there is no engine here; None when there is one or it can be started."""
    if shutil.which("docker") is None or shutil.which("docker-compose") is None:
        return "docker and docker-compose are not installed (apt-get install docker.io docker-compose)"
    if os.environ.get("DOCKER_HOST") or Engine("unix:///var/run/docker.sock").answers:
        return None
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        return "no engine answers, and only root can start a dockerd"
    return None


@contextmanager
def engine(directory: Path) -> Iterator[Engine]:
    """The engine there is, or one for the length of the block, whose traces in the network are removed behind it."""
    known = Engine(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    if known.answers:
        yield known
        return
    made = Engine(f"unix://{directory}/docker.sock")
    places = ["--data-root", f"{directory}/data", "--exec-root", f"{directory}/exec", "-p", f"{directory}/docker.pid"]
    limits = ["--storage-driver", "overlay2", "--default-ulimit", "nofile=20000:20000", "--bip", "10.88.200.1/24"]
    with _network_as_it_was(), _dockerd(made, [*places, *limits], directory):
        yield made


@contextmanager
def _dockerd(made: Engine, flags: list[str], directory: Path) -> Iterator[None]:
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(["dockerd", "-H", made.host, *flags], stdout=log, stderr=log)
    try:
        limit = time.monotonic() + START_S
        while not made.answers:
            assert process.poll() is None and time.monotonic() < limit, (directory / "log").read_text()[-4000:]
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(180)


@contextmanager
def _network_as_it_was() -> Iterator[None]:
    """dockerd changes the rules and policies of iptables, and switches forwarding on; the block's end puts them back."""
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    before, rules = forwarding.read_text(), _saved_rules()
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
        for table, lines in _saved_rules().items():
            chains = [line.split()[0] for line in lines if line.startswith(":") and line.split()[1] != "-"]
            as_it_was = rules.get(table, [f"*{table}", *(f"{chain} ACCEPT" for chain in chains), "COMMIT"])
            subprocess.run(["iptables-restore"], input="\n".join([*as_it_was, ""]), text=True, check=True)
        forwarding.write_text(before)


def _saved_rules() -> dict[str, list[str]]:
    """The lines of iptables-save by table; a table that was never used has none."""
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    tables: dict[str, list[str]] = {}
    for line in saved.splitlines():
        if line.startswith("*"):
            lines = tables[line[1:]] = []
        if not line.startswith("#"):
            lines.append(line.split(" [")[0] if line.startswith(":") else line)  # without counters
    return tables


def network() -> object:
    """What an engine of its own must leave as it was: rules and policies of iptables, forwarding, and its bridge."""
    rules = {table: lines for table, lines in _saved_rules().items() if any(_says_something(line) for line in lines)}
    return rules, Path("/proc/sys/net/ipv4/ip_forward").read_text(), Path("/sys/class/net/docker0").exists()


def _says_something(line: str) -> bool:
    return line.startswith("-A") or (line.startswith(":") and not line.endswith(" ACCEPT"))


def base_image(made: Engine, directory: Path) -> str:
    """An image with Python to build from: HOLDFAST_TEST_BASE, else a small Debian made by debootstrap."""
    named = os.environ.get("HOLDFAST_TEST_BASE")
    if named:
        return named
    if BASE in made.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split():
        return BASE
    root = Path(os.environ.get("HOLDFAST_TEST_ROOTFS", directory / "rootfs"))
    if not root.exists():
        made.run(
            "debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root), DEBIAN, timeout_s=BUILD_S
        )
    shutil.copy(CERTIFICATES, root / CERTIFICATES.lstrip("/"))  # a machine behind a proxy has one of its own
    archive = directory / "base.tar"
    made.run("tar", "-C", str(root), "-cf", str(archive), ".")
    made.docker("import", "--change", f"ENV PIP_CERT={CERTIFICATES}", str(archive), BASE)
    archive.unlink()
    return BASE
