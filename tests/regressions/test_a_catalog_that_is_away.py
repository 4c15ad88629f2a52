"""A catalog that is away stops no training: saves go on and are durable, a restart restores, and it is told when it is back.

Each with a real PostgreSQL that is killed or stopped, and a SQLite file that somebody locks, removes or damages.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CheckpointsMissing, StaleAttempt
from tests.daemons import RunningDaemon, running, wait_until
from tests.databases import Postgres

LAST = 8


class Place(NamedTuple):
    """A root, its catalog's address, and what takes the catalog away and brings it back."""

    root: Path
    url: str
    away: Callable[[], None]
    back: Callable[[], None]


def on_sqlite(tmp_path: Path) -> Place:
    root = tmp_path / "root"
    root.mkdir()
    path = root / naming.CATALOG
    locks: list[sqlite3.Connection] = []

    def lock() -> None:
        locks.append(sqlite3.connect(path, timeout=180, isolation_level=None))
        locks[0].execute("BEGIN IMMEDIATE")

    return Place(root, f"sqlite:///{path}", lock, lambda: locks.pop().close())


def on_postgres(tmp_path: Path, server: Postgres, stopped: bool) -> Place:
    if stopped:
        stop, go_on = partial(server.signal_all, signal.SIGSTOP), partial(server.signal_all, signal.SIGCONT)
        return Place(tmp_path / "root", server.make(), stop, go_on)
    return Place(tmp_path / "root", server.make(), server.stop, server.start)


@pytest.fixture(params=["locked", "killed", pytest.param("stopped", marks=pytest.mark.crash_slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "locked":
        yield on_sqlite(tmp_path)
        return
    made = on_postgres(tmp_path, request.getfixturevalue("postgres"), stopped=request.param == "stopped")
    try:
        yield made
    finally:
        if request.param == "stopped":
            made.back()


def serving(place: Place) -> AbstractContextManager[RunningDaemon]:
    return running(place.root, "--catalog", place.url, listen="127.0.0.1:0")


def trainer(daemon: RunningDaemon, value: float) -> tuple[Checkpointer, torch.Tensor]:
    weight = torch.full((64,), value)
    state = {"w": weight}
    return Checkpointer("run", state, at=daemon.socket), weight


def committed(place: Place) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (place.root / "run" / naming.CHECKPOINTS).iterdir())


def test_nothing_begins_at_zero_while_the_catalog_is_away(place: Place) -> None:
    """A run whose checkpoints were removed by hand is refused, by their steps once the catalog is back. A new run begins."""
    with serving(place) as daemon:
        first, weight = trainer(daemon, 0.0)
        assert first.restore() == 0
        first.save(1).result(180)
        with Api(daemon.url) as api:
            wait_until(lambda: [made.verified for made in api.checkpoints("run")] == [True])
        first.close()
        place.away()
        shutil.rmtree(place.root / "run" / naming.CHECKPOINTS)
        second, _ = trainer(daemon, -1.0)
        with pytest.raises(CatalogUnavailable, match="attempt 2") as caught:
            second.restore()
        assert "another run name" in (caught.value.hint or "")
        second.close()
        with Checkpointer("new", {"w": weight}, at=daemon.socket) as another:
            assert another.restore() == 0
        place.back()
        if not place.url.startswith("sqlite"):  # daemons of several machines wait 90 s for names that a file system may hide
            return
        wait_until(lambda: httpx.get(f"{daemon.url}/healthz", timeout=180).json()["status"] == "ok")
        third, _ = trainer(daemon, -1.0)
        with pytest.raises(CheckpointsMissing, match="step 1"):
            third.restore()
        third.close()


def test_training_goes_on_while_the_catalog_is_away(place: Place) -> None:
    """No save raises, every ticket is durable, a launch restores what was saved and fences the older one off (I6).

    `/metrics` and `/healthz` answer; when the catalog is back it lists all of it, in order.
    """
    with serving(place) as daemon:
        first, weight = trainer(daemon, 0.0)
        assert first.restore() == 0
        first.save(1).result(180)
        place.away()
        for step in range(2, LAST):
            weight.fill_(step)
            first.save(step).result(180)
        assert committed(place) == list(range(1, LAST))
        second, restored = trainer(daemon, -1.0)
        assert second.restore() == LAST - 1 and restored.eq(LAST - 1).all()
        with pytest.raises(StaleAttempt):
            first.save(LAST).result(180)
        second.save(LAST).result(180)
        wait_until(lambda: httpx.get(f"{daemon.url}/healthz", timeout=180).json()["status"] == "degraded")
        with Api(daemon.url) as api:
            metrics = api.request("GET", "/metrics").text
        assert "holdfast_catalog_up 0.0" in metrics and "holdfast_ranks 2.0" in metrics
        place.back()
        with Api(daemon.url) as api:
            wait_until(lambda: httpx.get(f"{daemon.url}/healthz", timeout=180).json()["status"] == "ok")
            verified = list(range(1, LAST + 1))
            wait_until(lambda: sorted(made.step for made in api.checkpoints("run") if made.verified) == verified)
            rounds = [made for made in api.rounds("run") if made.state == "committed"]
            assert [made.step for made in rounds] == list(range(LAST, 0, -1))
            assert api.run("run").attempt == 2
        second.close()
        first.close()


def test_a_daemon_starts_without_its_catalog(tmp_path: Path, postgres: Postgres) -> None:
    """It says what it lacks; what was declared and answered before stands, a new launch restores and saves."""
    place = on_postgres(tmp_path, postgres, stopped=False)
    with serving(place) as daemon:
        first, weight = trainer(daemon, 3.0)
        first.restore()
        first.save(3).result(180)
        first.close()
    place.away()
    try:
        with serving(place) as daemon:
            second, weight = trainer(daemon, 0.0)
            assert second.restore() == 3 and weight.eq(3).all()
            second.save(4).result(180)
            assert "starts without it" in daemon.log.read_text()
            place.back()
            with Api(daemon.url) as api:
                wait_until(lambda: httpx.get(f"{daemon.url}/healthz", timeout=180).json()["status"] == "ok")
                assert api.run("run").attempt == 2
                wait_until(lambda: [made.step for made in api.checkpoints("run") if made.verified] == [4, 3])
            second.close()
    finally:
        postgres.stop()
        postgres.start()


@pytest.mark.parametrize("left", [None, b"not a database at all" * 500], ids=["empty", "damaged"])
def test_a_catalog_that_comes_back_as_another(tmp_path: Path, left: bytes | None) -> None:
    """Its file is removed, or overwritten, while it is in use: it is made anew from the directories, with no restart."""
    place = on_sqlite(tmp_path)
    path = place.root / naming.CATALOG
    with serving(place) as daemon:
        first, _ = trainer(daemon, 1.0)
        first.restore()
        first.save(1).result(180)
        with Api(daemon.url) as api:
            wait_until(lambda: api.checkpoint("run", 1).verified)
        for name in (naming.CATALOG, f"{naming.CATALOG}-wal", f"{naming.CATALOG}-shm"):
            (place.root / name).unlink(missing_ok=True)
        if left is not None:
            path.write_bytes(left)
        for step in (2, 3):
            first.save(step).result(180)
        with Api(daemon.url) as api:
            wait_until(lambda: path.exists() and sorted(made.step for made in api.checkpoints("run")) == [1, 2, 3])
            assert api.run("run").attempt == 1
        second, _ = trainer(daemon, 0.0)
        assert second.restore() == 3
        second.close()
        first.close()
