"""The Compose file of three nodes with a real engine (make engine): they train, one is lost for good, the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from tests.engine import BUILD_S, Engine, base_image, engine, missing

TOP = Path(__file__).parent.parent
FILE = TOP / "deploy" / "compose" / "many-nodes.yml"
PROJECT, POSTGRES = "holdfast-nodes-test", "holdfast-test-postgres"
WAIT_S = 600.0  # torchrun's launchers need a while to agree that one of them is gone
pytestmark = pytest.mark.engine

# No registry is asked for images: PostgreSQL is Debian's, and the trainers use this environment's packages.
DATABASE = r"""
ARG BASE
FROM ${BASE}
RUN apt-get update -q && apt-get install -q -y --no-install-recommends postgresql
RUN cd /usr/lib/postgresql/*/bin && ln -s $PWD /programs \
    && su postgres -c "/programs/initdb -D /var/lib/postgresql/made -A trust -U holdfast -E UTF8 --no-locale" \
    && echo 'host all all all trust' >> /var/lib/postgresql/made/pg_hba.conf \
    && su postgres -c "/programs/pg_ctl -D /var/lib/postgresql/made -w start && createdb -U holdfast holdfast \
       && /programs/pg_ctl -D /var/lib/postgresql/made -w stop"
USER postgres
CMD ["/programs/postgres", "-D", "/var/lib/postgresql/made", "-c", "listen_addresses=*"]
"""


class Nodes:
    """The project of the Compose file."""

    def __init__(self, made: Engine, file: Path) -> None:
        self.made, self._file = made, file

    def compose(self, *words: str) -> str:
        return self.made.run(
            "docker-compose", "--project-name", PROJECT, "--file", str(self._file), *words, timeout_s=WAIT_S
        )

    def said(self, service: str, *command: str) -> str:
        """What a command prints in the container of a service."""
        container = self.compose("ps", "--quiet", service).strip()
        return self.made.docker("exec", container, *command)

    def steps(self) -> dict[int, int]:
        """The world that saved each checkpoint, by step, as node-1 lists them; none while there is no run."""
        ask = 'found=$(holdfast ls demo --json) && echo "$found" || echo "[]"'
        listed = json.loads(self.said("node-1", "sh", "-c", ask))
        return {found["step"]: found["world"] for found in listed}

    def states(self) -> dict[str, str]:
        return {node["name"]: node["state"] for node in json.loads(self.said("node-1", "holdfast", "nodes", "--json"))}

    def wait(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < limit, self.compose("logs", "--tail", "40")
            time.sleep(2)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if why := missing():
        pytest.skip(why)
    with engine(tmp_path) as made:
        base = base_image(made, tmp_path)
        version = made.docker("run", "--rm", base, "python3", "-c", "import sys; print(sys.version_info[:2])").strip()
        if version != str(tuple(sys.version_info[:2])):
            pytest.skip(f"the image's Python is {version}: it cannot use this environment's packages")
        build = ["build", "--network=host", "--build-arg", f"BASE={base}"]
        service = ["-f", "deploy/Dockerfile", "--target", "service", "-t", "holdfast"]
        made.docker(*build, *service, str(TOP), timeout_s=BUILD_S)
        (tmp_path / "Dockerfile").write_text(DATABASE)
        made.docker(*build, "-t", POSTGRES, "-f", str(tmp_path / "Dockerfile"), str(tmp_path), timeout_s=BUILD_S)
        path = tmp_path / "many-nodes.yml"
        path.write_text(yaml.safe_dump(as_here(base)))
        started = Nodes(made, path)
        try:
            started.compose("up", "--detach", "postgres")
            yield started
        finally:
            started.compose("down", "--volumes", "--timeout", "30")


def as_here(base: str) -> dict[str, object]:
    """The Compose file with the images of this machine."""
    file: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(FILE.read_text())
    packages = Path(torch.__file__).parents[1]
    sources = [f"{packages}:/packages:ro", *(f"{TOP}/{room}:/source/{room}:ro" for room in ("client", "formats"))]
    path = {"PYTHONPATH": "/source/client:/source/formats:/packages", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}
    for name, service in file["services"].items():
        service.pop("build", None)
        service.pop("ports", None)
        if name.startswith("trainer"):
            volumes = service["volumes"]
            assert isinstance(volumes, list)
            service |= {"image": base, "volumes": volumes + sources, "environment": path}
            service["entrypoint"] = ["python3", "-m", "torch.distributed.run"]
    file["services"]["postgres"] |= {"image": POSTGRES, "volumes": []}
    return dict(file)


def test_three_nodes_train_and_two_go_on(nodes: Nodes) -> None:
    """What all three have saved is continued by two without anybody's doing, and by three once the lost one is back."""
    for _ in range(3):  # on a busy machine a container may be healthy later than docker-compose waits for
        try:
            nodes.compose("up", "--detach")
            break
        except (AssertionError, subprocess.TimeoutExpired):
            time.sleep(30)
    nodes.wait(lambda: 3 in nodes.steps().values())
    assert set(nodes.states().values()) == {"live"}
    nodes.compose("kill", "node-3", "trainer-3")
    newest = max(nodes.steps())
    nodes.wait(lambda: any(step > newest and world == 2 for step, world in nodes.steps().items()))
    assert nodes.states() == {"node-1": "live", "node-2": "live", "node-3": "lost"}
    nodes.compose("up", "--detach", "node-3", "trainer-3")
    newest = max(nodes.steps())
    nodes.wait(lambda: any(step > newest and world == 3 for step, world in nodes.steps().items()))
    assert nodes.states() == {"node-1": "live", "node-2": "live", "node-3": "returned"}
