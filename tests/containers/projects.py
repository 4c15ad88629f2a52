"""Compose files that are run with a real engine, and what is asked of their containers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.engine import Engine

TOP = Path(__file__).parents[2]
HEALTHY_S = 300.0
PATIENT = {"interval": "2s", "timeout": "120s", "retries": 60}  # a busy machine takes longer to ask after health
SOCKET = "/run/holdfast/holdfast.sock"
TESTS = f"{TOP}/tests:/tests/tests:ro"
# What the daemon of this container answers to its owner.
ASK_OWN = """
import httpx, sys
from holdfast.rest.owner_auth import OwnersToken
url = "http://127.0.0.1:8420"
print(httpx.get(url + sys.argv[1], auth=OwnersToken(url), trust_env=False).raise_for_status().text)
"""


class Project(NamedTuple):
    """A Compose file that is run."""

    made: Engine
    name: str
    file: Path

    def run(self, *words: str) -> str:
        return self.made.run("docker-compose", "--project-name", self.name, "--file", str(self.file), *words)

    def up(self, *services: str) -> None:
        """Start services, and wait until they are healthy."""
        self.run("up", "--detach", *services)
        for service in services:
            container = self.run("ps", "--quiet", service).strip()
            limit = time.monotonic() + HEALTHY_S
            while health(self.made, container) != "healthy":
                assert time.monotonic() < limit, self.made.docker("logs", container)
                time.sleep(0.5)


@contextmanager
def project(
    made: Engine, name: str, directory: Path, compose: Mapping[str, Any], check: Mapping[str, Any] = PATIENT
) -> Iterator[Project]:
    """A Compose file without what is built, and without ports of this machine; all that it made is removed in the end.
    `check`: the health check of its services.
    """
    services = {service: {**about} for service, about in compose["services"].items()}
    for about in services.values():
        about.pop("build", None)
        about.pop("ports", None)
        about["healthcheck"] = {**check}
    file = directory / "docker-compose.yml"
    file.write_text(yaml.safe_dump({**compose, "services": services}))
    found = Project(made, name, file)
    try:
        yield found
    finally:
        found.run("down", "--volumes", "--timeout", "30")


def health(made: Engine, container: str) -> str:
    return made.docker("inspect", "--format", "{{.State.Health.Status}}", container).strip()


def inside(made: Engine, container: str, *command: str) -> str:
    return made.docker("exec", container, *command)
