"""The image and the Compose file with a real engine (make engine): built, healthy, and a save that crosses containers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.engine import BUILD_S, Engine, base_image, engine, missing

TOP = Path(__file__).parent.parent
PROJECT = "holdfast-test"
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has built the service's image."""
    why = missing()
    if why:
        pytest.skip(why)
    directory = tmp_path_factory.mktemp("engine")
    with engine(directory) as found:
        build = ["build", "--network=host", "-f", "deploy/Dockerfile", "--target", "service", "-t", "holdfast"]
        found.docker(*build, "--build-arg", f"BASE={base_image(found, directory)}", str(TOP), timeout_s=BUILD_S)
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Compose file with a trainer that needs no torch: a rank of the crash lab's, in the service's image."""
    compose = yaml.safe_load((TOP / "docker-compose.yml").read_text())
    services = {name: compose["services"][name] for name in ("holdfast", "trainer")}
    for service in services.values():
        service.pop("build")
    services["holdfast"]["ports"] = []
    trainer = services["trainer"]
    trainer["image"] = "holdfast"
    trainer["volumes"] += [f"{TOP}/tests:/tests/tests:ro"]
    trainer["environment"] = {"PYTHONPATH": "/tests"}
    # It ends with its standard input; by then all it saves is committed. Its only argument is the launch.
    rank = "python -m tests.crash.acting_rank /data /run/holdfast/holdfast.sock demo 0 1 $$0 1,2,3 1048576"
    trainer["entrypoint"], trainer["command"] = ["sh", "-c", f"sleep 15 | {rank}"], ["launch-1"]
    path = tmp_path_factory.mktemp("compose") / "docker-compose.yml"
    path.write_text(yaml.safe_dump({"services": services, "volumes": {name: {} for name in ("data", "socket")}}))
    return path


@pytest.fixture(scope="module")
def up(made: Engine, file: Path) -> Iterator[str]:
    """The daemon's container, healthy."""
    compose = ("docker-compose", "--project-name", PROJECT, "--file", str(file))
    made.run(*compose, "up", "--detach", "holdfast")
    container = made.run(*compose, "ps", "--quiet", "holdfast").strip()
    try:
        limit = time.monotonic() + 90
        while health(made, container) != "healthy":
            assert time.monotonic() < limit, made.docker("logs", container)
            time.sleep(0.5)
        yield container
    finally:
        made.run(*compose, "down", "--volumes", "--timeout", "30")


def health(made: Engine, container: str) -> str:
    return made.docker("inspect", "--format", "{{.State.Health.Status}}", container).strip()


def inside(made: Engine, container: str, *command: str) -> str:
    return made.docker("exec", container, *command)


def test_image_is_small_and_nobodys_root(made: Engine) -> None:
    """No torch and no pip in it, a user of its own, a health check, and less than 150 MB over its base."""
    about = json.loads(made.docker("image", "inspect", "holdfast"))[0]
    assert about["Config"]["User"] == "holdfast"
    assert about["Config"]["Healthcheck"]["Test"][0] == "CMD"
    layers = made.docker("history", "--format", "{{.Size}} {{.CreatedBy}}", "--human=false", "holdfast").splitlines()
    added = sum(int(line.split()[0]) for line in layers if "COPY" in line or "useradd" in line)
    assert 0 < added < 150e6, layers
    listed = made.docker("run", "--rm", "--entrypoint", "ls", "holdfast", "/opt/holdfast/lib").split()
    packages = made.docker(
        "run", "--rm", "--entrypoint", "ls", "holdfast", f"/opt/holdfast/lib/{listed[0]}/site-packages"
    ).split()
    assert "holdfast" in packages and not {"torch", "pip"} & set(packages)


def test_daemon_serves_as_its_user(made: Engine, up: str) -> None:
    """It is healthy, its process is user 10001, and the command line works in the container."""
    assert inside(made, up, "id", "-u").strip() == "10001"
    nodes = json.loads(inside(made, up, "holdfast", "top", "--json"))
    assert nodes == []


def test_save_crosses_containers(made: Engine, up: str, file: Path) -> None:
    """A rank in another container gets its memory over the shared socket; what it sealed is committed and verified."""
    compose = ("docker-compose", "--project-name", PROJECT, "--file", str(file))
    said = made.run(*compose, "run", "--rm", "trainer").splitlines()
    assert [line for line in said if line.startswith("committed")] == ["committed 1", "committed 2", "committed 3"]
    assert "waited" in inside(made, up, "sh", "-c", "holdfast wait --idle && echo waited")
    listed = json.loads(inside(made, up, "holdfast", "ls", "demo", "--json"))
    assert [(found["step"], found["verified"]) for found in listed] == [(3, True), (2, True), (1, True)]
    again = made.run(*compose, "run", "--rm", "trainer", "launch-2").splitlines()
    assert "restored 3" in again  # read through the volume, every byte compared


def test_ipc_is_shared(made: Engine, up: str, file: Path) -> None:
    """The trainer sees the daemon's /dev/shm, of the size that the Compose file gives it."""
    inside(made, up, "touch", "/dev/shm/from-the-daemon")
    compose = ("docker-compose", "--project-name", PROJECT, "--file", str(file))
    shown = made.run(*compose, "run", "--rm", "--entrypoint", "sh", "trainer", "-c", "ls /dev/shm; df -k /dev/shm | tail -1")
    assert "from-the-daemon" in shown and str(2**20) in shown


def test_orderly_end(made: Engine, up: str) -> None:
    """SIGTERM ends it within the grace period, with nothing left to kill."""
    made.docker("stop", "--time", "60", up)
    assert made.docker("inspect", "--format", "{{.State.ExitCode}}", up).strip() == "0"
