"""Bodies of JSON that are not what is asked for, member by member: refused by name, and never a defect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.attack.matrix import BODIES, OWN, ROUTES, Route
from tests.attack.sockets import as_json, ask
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running

JSON = [("Content-Type", "application/json")]
ODD: tuple[Any, ...] = (
    {},
    [],
    [[]],
    {"a": {}},
    None,
    True,
    "",
    "\x00",
    "a" * 5000,
    "../..",
    "\U0001f980",
    0,
    -1,
    2**53 + 1,
    2**63 - 1,
    -(2**63) + 1,
    1e308,
    0.5,
    "1",
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    root = tmp_path_factory.mktemp("odd") / "root"
    build_root(root, {OWN: (5,)})
    with running(root, listen="127.0.0.1:0") as started:
        yield started
        assert "Traceback" not in started.log.read_text()


def variants(sound: Any) -> Iterator[Any]:
    """The body with each member replaced, left out, or beside one that nobody asked for; and something else altogether."""
    yield from ODD
    if isinstance(sound, dict):
        for name in (*sound, "arguments", "runs", "problem", "groups", "step"):
            yield from ({**sound, name: odd} for odd in ODD)
            yield {other: value for other, value in sound.items() if other != name}


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body == "json"], ids=lambda route: f"{route.path}")
def test_a_body_of_another_shape(daemon: RunningDaemon, route: Route) -> None:
    """Whatever stands where a text or a number should: an answer, or a problem that says what is wrong."""
    sound = json.loads(BODIES[route.path](OWN))
    if route.path == "/v1/jobs":
        sound["kind"] = "verify"
    for body in variants(sound):
        answer = ask(daemon.url, route.method, route.target(OWN), JSON, as_json(body))
        assert answer.status and (answer.status < 500 or answer.status in (503, 504, 507)), (body, answer)
