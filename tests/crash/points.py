"""Where processes are stopped at named points, to be killed there (`stops`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash.launches import holders, kill_all, processes
from tests.daemons import runtime_directory, wait_until

STOPS = Path(__file__).with_name("stops")


class Place(NamedTuple):
    """A root, where the daemon's socket is, and where a stopped process leaves its mark."""

    root: Path
    marks: Path

    @property
    def stopped(self) -> int | None:
        """The process that waits at the point."""
        text = (self.marks / "hit").read_text() if (self.marks / "hit").exists() else ""
        return int(text) if text.endswith("\n") else None


@pytest.fixture
def place() -> Iterator[Place]:
    """A short path, for sockets; afterwards no process is left that began here."""
    with runtime_directory() as directory:
        made = Place(directory / "root", directory / "marks")
        made.marks.mkdir()
        yield made
        (made.marks / "go").touch()
        kill_all()
        for pid in processes(directory, b"\0holdfast_service\0"):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: holders(directory) == [])


def stop_at(point: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here on know the point."""
    path = os.pathsep.join(filter(None, [str(STOPS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("CRASH_POINT", point)
    monkeypatch.setenv("CRASH_DIRECTORY", str(place.marks))
