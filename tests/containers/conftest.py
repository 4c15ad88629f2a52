"""An engine with the daemon's image, and the project of docker-compose.yml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.containers.projects import TESTS, TOP, Project, project
from tests.engine import BUILD_S, Engine, base_image, engine, missing

# A rank of the crash lab, whose standard input ends, and with it the rank, when each of its saves has ended.
ACT = """
import subprocess, sys
rank = ["/run/holdfast/holdfast.sock", "demo", "0", "1", sys.argv[1], "1,2,3", "1048576", "/data"]
command, ended = [sys.executable, "-m", "tests.crash.rank_process", *rank], 0
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
    for line in started.stdout:
        print(line, end="", flush=True)
        ended += line.startswith(("committed", "aborted", "refused"))
        if ended == 3:
            started.stdin.close()
sys.exit(started.returncode)
"""


@pytest.fixture(scope="session")
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
def run(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The Compose file with a trainer that needs no torch: a rank of the crash lab's, in the service's image."""
    compose = yaml.safe_load((TOP / "docker-compose.yml").read_text())
    services = {name: compose["services"][name] for name in ("holdfast", "trainer")}
    trainer = services["trainer"]
    services["holdfast"]["image"] = trainer["image"] = "holdfast"
    trainer["volumes"] += [TESTS]
    trainer["environment"] = {"PYTHONPATH": "/tests"}
    trainer["entrypoint"], trainer["command"] = ["python", "-c", ACT], ["launch-1"]
    volumes: dict[str, Any] = {name: {} for name in ("data", "socket")}
    directory = tmp_path_factory.mktemp("compose")
    with project(made, "holdfast-test", directory, {"services": services, "volumes": volumes}) as found:
        yield found


@pytest.fixture(scope="module")
def up(run: Project) -> str:
    """The daemon's container, healthy."""
    run.up("holdfast")
    return run.run("ps", "--quiet", "holdfast").strip()
