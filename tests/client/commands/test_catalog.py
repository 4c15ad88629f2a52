"""A real daemon whose catalog is on PostgreSQL, or damaged, or gone; and `holdfast catalog`, which looks after it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast import Api, Checkpointer
from holdfast.cli import app
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable
from tests.daemons import RunningDaemon, running, wait_until
from tests.databases import Postgres

pytestmark = pytest.mark.usefixtures("forked_programs")

HTTP = "127.0.0.1:0"


@pytest.fixture
def url(postgres: Postgres) -> Iterator[str]:
    made = postgres.take()
    yield made
    postgres.give_back(made)


def train(daemon: RunningDaemon, steps: range, keep_last: int | None = None) -> int:
    """Restore, then save these steps; the step that was restored."""
    state = {"x": torch.zeros(4096), "step": 0}
    with Checkpointer("run", {"model": state}, at=daemon.socket, keep_last=keep_last) as checkpointer:
        restored = checkpointer.restore()
        assert restored == 0 or torch.equal(state["x"], torch.full((4096,), float(restored)))
        for step in steps:
            state["x"].fill_(step)
            checkpointer.save(step).result(180)
    return restored


def listed(daemon: RunningDaemon) -> list[int]:
    with Api(daemon.url) as api:
        return [made.step for made in api.checkpoints("run")]


def listed_if_there(daemon: RunningDaemon) -> list[int] | None:
    """The same; None while the catalog is still away."""
    try:
        return listed(daemon)
    except CatalogUnavailable:
        return None


def holdfast(*arguments: object) -> tuple[int, Any]:
    """The exit status of a command, and the JSON that it prints."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_save_a_restore_and_a_rotation_on_postgresql(tmp_path: Path, postgres: Postgres, url: str) -> None:
    """All that a trainer does works on PostgreSQL, over restarts of daemon and server, and the root has no catalog in it."""
    root = tmp_path / "root"
    with running(root, "--catalog", url, listen=HTTP) as daemon:
        assert train(daemon, range(1, 5), keep_last=2) == 0
        wait_until(lambda: listed(daemon) == [4, 3])
        with Api(daemon.url) as api:
            assert [(made.step, made.state) for made in api.rounds("run")] == [(n, "committed") for n in (4, 3, 2, 1)]
        assert holdfast("catalog", "check", "--url", daemon.url)[0] == 0
        postgres.stop()
        postgres.start()
        assert train(daemon, range(5, 7), keep_last=2) == 4
        wait_until(lambda: listed_if_there(daemon) == [6, 5])
    with running(root, "--catalog", url, listen=HTTP) as daemon:
        assert train(daemon, range(7, 8)) == 6
        assert holdfast("catalog", "check", "--url", daemon.url)[0] == 0
    assert not (root / naming.CATALOG).exists()
    status, found = holdfast("catalog", "check", "--root", root, "--catalog", url, "--thorough")
    assert (status, found["manifests_read"], found["items"]) == (0, 2, [])
    assert "secret" not in (daemon.log.read_text() + json.dumps(found))


def test_a_catalog_that_is_down_is_told_of_the_saves_when_it_is_back(tmp_path: Path, postgres: Postgres, url: str) -> None:
    """While the server is down saves are committed as ever; when it is up all of them are listed."""
    with running(tmp_path / "root", "--catalog", url, listen=HTTP) as daemon:
        state = {"x": torch.zeros(16)}
        with Checkpointer("run", {"model": state}, at=daemon.socket) as checkpointer:
            checkpointer.save(1).result(180)
            postgres.stop()
            try:
                checkpointer.save(2).result(180)
            finally:
                postgres.start()
            checkpointer.save(3).result(180)
        wait_until(lambda: listed_if_there(daemon) == [3, 2, 1])


def damage(path: Path, where: float) -> None:
    """Overwrite a page of the file, as a bad disk would."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(int(size * where) // 4096 * 4096)
        file.write(os.urandom(4096))


@pytest.mark.parametrize("how", ["gone", "no database", "a page in it"])
def test_a_lost_catalog_comes_back_by_itself(tmp_path: Path, how: str) -> None:
    """The next start makes it anew: checkpoints are listed, training goes on, attempts ascend, what was damaged is kept."""
    root = tmp_path / "root"
    with running(root, listen=HTTP) as daemon:
        train(daemon, range(1, 4))
        train(daemon, range(4, 5))
    path = root / naming.CATALOG
    if how == "gone":
        path.unlink()
        path.with_name(f"{path.name}-wal").write_bytes(b"what somebody left" * 1000)
    elif how == "no database":
        path.write_bytes(b"not a database" * 1000)
    else:
        damage(path, 0.5)
    with running(root, listen=HTTP) as daemon:
        assert listed(daemon) == [4, 3, 2, 1]
        with Api(daemon.url) as api:
            before = api.run("run").attempt
            assert before >= 2  # step 4 bears it
            assert train(daemon, range(5, 6)) == 4
            assert api.run("run").attempt == before + 1
        assert holdfast("catalog", "check", "--url", daemon.url)[0] == 0
    kept = "catalog.sqlite.damaged-1-wal" if how == "gone" else "catalog.sqlite.damaged-1"
    assert (root / kept).exists()


def test_what_can_be_read_of_a_damaged_catalog_is_kept(tmp_path: Path) -> None:
    """Attempts that no checkpoint bears, events and rounds come over; that bytes were proven is not believed any more."""
    root = tmp_path / "root"
    with running(root, listen=HTTP) as daemon:
        train(daemon, range(1, 3))
        for _ in range(3):
            train(daemon, range(0))
        with Api(daemon.url) as api:
            wait_until(lambda: all(made.verified for made in api.checkpoints("run")))
            attempt = api.run("run").attempt
    with closing(sqlite3.connect(root / naming.CATALOG)) as connection, connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rounds_by_state'").fetchone()
        rounds = connection.execute("SELECT count(*) FROM rounds").fetchone()[0]
    with open(root / naming.CATALOG, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    status, found = holdfast("catalog", "check", "--root", root)
    assert (status, found["code"]) == (6, "storage-failed")
    status, made = holdfast("catalog", "rebuild", "--root", root)
    assert (status, made["left"], made["checkpoints"]) == (0, [], 2)
    assert (made["salvaged"]["rounds"], made["salvaged"]["checkpoints"]) == (rounds, 2)
    assert Path(made["set_aside"]).exists()
    assert holdfast("catalog", "check", "--root", root)[0] == 0
    with running(root, listen=HTTP) as daemon, Api(daemon.url) as api:
        assert api.run("run").attempt == attempt
        assert [made.step for made in api.rounds("run")] == [2, 1]


class TestCommand:
    """`holdfast catalog`: what it says, and how it ends."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        made = tmp_path / "root"
        with running(made) as daemon:
            train(daemon, range(1, 4))
        return made

    def test_a_contradiction_is_named_and_mended(self, root: Path) -> None:
        """Exit status 1 while there is one; a rebuild ends that."""
        (root / naming.checkpoint_path("run", 2) / naming.COMMIT).unlink()
        result = CliRunner().invoke(app, ["catalog", "check", "--root", str(root)])
        assert result.exit_code == 1
        assert "listed-but-unreadable" in result.stdout and "run@2" in result.stdout
        status, made = holdfast("catalog", "rebuild", "--root", root)
        assert (status, made["left"], made["checkpoints"]) == (0, [], 3)  # it is listed as damaged, which is what it is
        assert CliRunner().invoke(app, ["catalog", "check", "--root", str(root)]).exit_code == 0

    def test_a_root_that_is_served_is_left_to_its_daemon(self, root: Path) -> None:
        """The command says who holds the root, and asks the service when it is told to."""
        with running(root, listen=HTTP) as daemon:
            status, problem = holdfast("catalog", "rebuild", "--root", root)
            assert (status, problem["code"]) == (4, "root-busy")
            status, found = holdfast("catalog", "check", "--url", daemon.url)
            assert (status, found["checkpoints"], found["sound"]) == (0, 3, True)
            shown = CliRunner().invoke(app, ["catalog", "check", "--url", daemon.url]).stdout
            assert "3 checkpoints in 1 runs" in shown and "no contradictions" in shown

    def test_wrong_requests_are_named(self, root: Path, tmp_path: Path) -> None:
        """Two places at once, a root that is not there, a catalog that is not there, an address that is none."""
        (tmp_path / "empty").mkdir()
        assert holdfast("catalog", "check", "--root", root, "--url", "http://127.0.0.1:9")[1]["code"] == "invalid-request"
        assert holdfast("catalog", "check", "--root", tmp_path / "nowhere")[1]["code"] == "storage-failed"
        assert holdfast("catalog", "check", "--root", tmp_path / "empty")[1]["code"] == "storage-failed"
        assert holdfast("catalog", "check", "--root", root, "--catalog", "nonsense")[1]["code"] == "invalid-request"
        assert holdfast("catalog", "check", "--url", "http://127.0.0.1:9")[1]["code"] == "daemon-gone"
