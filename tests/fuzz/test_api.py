"""The API, asked for what its own description allows and for much that it does not: no defect, and every error a problem.

A real daemon over a real root, so that uploads, segments and removals are real as well. 503, 504 and 507 are documented
answers; any other 5xx is a defect, and so is a body that is not what the description says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CheckContext
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast_formats.errors import LEAVES
from tests.checkpoints import build_root
from tests.daemons import RunningDaemon, running

DOCUMENTED = {503, 504, 507}
RUNS = {"tiny": (5, 10), "other": (1,), "spare": (1,)}
FLAGS = ("--arena-bytes-max", "50000000", "--spill", "never", "--silence-max", "5")
QUICK = 2
LONG = 100
# What is really there, so that not all end at the first look-up: parameter -> values.
REAL: dict[str, list[Any]] = {
    "run": ["tiny", "other"],
    "step": ["latest", "5", "10", "1"],
    "name": ["COMMIT", "manifest.json", "model-00001-of-00002.safetensors", "state.json"],
    "label": ["good"],
    "rank_id": ["a" * 32],
    "number": [0],
    "part": ["data", "table"],
}
MOVES_RUNS = {("DELETE", "/v1/runs/{run}"), ("POST", "/v1/runs/{run}/rename")}  # these get no other run than "spare"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    root = tmp_path_factory.mktemp("api") / "root"
    build_root(root, RUNS)
    with running(root, *FLAGS, listen="127.0.0.1:0") as started:
        yield started
        log = started.log.read_text()
        assert "Traceback" not in log, log[-5000:]


@pytest.fixture(scope="module")
def described(daemon: RunningDaemon) -> Any:
    return schemathesis.openapi.from_url(f"{daemon.url}/openapi.json", timeout=180)


def is_whole_problem(context: CheckContext, response: Any, case: Any) -> None:
    """Errors have all members of a problem, a code that is documented, and a status that is allowed."""
    status = response.status_code
    if status < 400:
        return
    assert status < 500 or status in DOCUMENTED, f"{status}: {response.text[:500]}"
    assert response.headers["content-type"][0] == "application/problem+json"
    if case.method.upper() == "HEAD":
        return
    body = response.json()
    assert body["status"] == status and body["code"] in {leaf.code for leaf in LEAVES}
    assert {"type", "title", "detail", "retryable", "hint"} <= body.keys()


CHECKS = [is_whole_problem, status_code_conformance, content_type_conformance, response_schema_conformance]


def ask(described: Any, mode: GenerationMode, examples: int, seconds: float = inf) -> int:
    """Ask every operation this often, in any order, until the time is over; the number of operations."""
    asked, end = 0, time.monotonic() + seconds
    operations = [found.ok() for found in described.get_all_operations()]
    random.shuffle(operations)
    for operation in operations:
        if time.monotonic() > end:
            break

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans(), data=st.data())
        def check(case: schemathesis.Case, real: bool, data: st.DataObject) -> None:
            for name in case.path_parameters if real and case.path_parameters else ():
                if name in REAL:
                    moves = (case.method.upper(), case.operation.path) in MOVES_RUNS
                    case.path_parameters[name] = data.draw(st.sampled_from(["spare"] if moves else REAL[name]), name)
            case.call_and_validate(checks=CHECKS, timeout=180)

        with suppress(Unsatisfiable):  # an operation that takes nothing cannot be asked wrongly
            check()
        asked += 1
    return asked


def test_what_is_described(described: Any) -> None:
    """Each operation, with arguments that fit its description; those that do not are in the long lane, and fixed ones in
    `tests/api/test_odd_bodies.py`.
    """
    assert ask(described, GenerationMode.POSITIVE, QUICK) > 30


@pytest.mark.crash_slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_what_is_described_at_length(described: Any, mode: GenerationMode, request: pytest.FixtureRequest) -> None:
    """The same for --fuzz-s seconds, or until all have been asked; and with arguments that do not fit."""
    assert ask(described, mode, LONG, request.config.getoption("--fuzz-s") or inf)


def test_the_daemon_is_as_before(daemon: RunningDaemon) -> None:
    """After all that it still answers, and no run is gone but the one that may be moved away."""
    assert httpx.get(f"{daemon.url}/readyz", trust_env=False).status_code == 200
    kept = {path.name for path in Path(daemon.root).iterdir()}
    assert {"tiny", "other"} <= kept
