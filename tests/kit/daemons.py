"""One daemon for all tests of a worker that need no flags, and a run of each test's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.daemons import RunningDaemon, running

_numbers = itertools.count()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """It listens. A test that kills it, looks at all of its runs or needs flags starts its own."""
    with running(tmp_path_factory.mktemp("shared") / "root", listen="127.0.0.1:0") as made:
        yield made


def own_daemon(*flags: str, listen: str = "127.0.0.1:0", scope: Literal["function", "module"] = "module") -> Any:
    """The fixture `daemon` of a module whose tests share no daemon with others: one for all of them, or one for each."""

    @pytest.fixture(scope=scope)
    def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
        with running(tmp_path_factory.mktemp("own") / "root", *flags, listen=listen) as daemon:
            yield daemon

    return made


@pytest.fixture
def run() -> str:
    """A name that no other test of this worker has."""
    return f"run-{next(_numbers)}"
