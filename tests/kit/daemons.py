"""One daemon for all tests of a worker that need no flags, and a run of each test's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.daemons import RunningDaemon, running

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """It listens. A test that kills it, looks at all of its runs or needs flags starts its own."""
    with running(tmp_path_factory.mktemp("shared") / "root", listen="127.0.0.1:0") as made:
        yield made


@pytest.fixture
def run() -> str:
    """A name that no other test of this worker has."""
    return f"run-{next(_numbers)}"
