"""A catalog that is gone or damaged: what stood beside it goes with it, and no other catalog's log is ever replayed."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from holdfast import Api, Checkpointer
from holdfast_formats import naming
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.catalog import Catalog
from tests.daemons import running

NOW = "2030-01-01T00:00:00.000Z"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The log of a catalog that knows a run of its own, as a kill leaves it; beside it its index."""
    path = tmp_path / "foreign" / "catalog.sqlite"
    path.parent.mkdir()
    catalog = Catalog.open(f"sqlite:///{path}")
    catalog.declare_attempt("foreign", "one", 1, NOW)
    for suffix in ("-wal", "-shm"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"left{suffix}")
    catalog.close()
    return tmp_path / "left"


def made(path: Path, *runs: str) -> None:
    catalog = Catalog.open(f"sqlite:///{path}")
    for run in runs:
        catalog.declare_attempt(run, "one", 1, NOW)
    catalog.close()


def spoilt(path: Path) -> tuple[int, int]:
    """Where an index stands, and how long its page is: without it all rows can still be read."""
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rounds_by_state'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    return (page - 1) * size, size


def damage_at(path: Path, page: tuple[int, int]) -> None:
    with open(path, "r+b") as file:
        file.seek(page[0])
        file.write(b"\xff" * page[1])


def opened(path: Path) -> set[str]:
    """The runs that the catalog knows when it was opened as a daemon does."""
    found = recovery.open_catalog(f"sqlite:///{path}").catalog
    runs = set(found.known_runs())
    found.close()
    return runs


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path.parent) if name.startswith(path.name))


def test_what_was_left_of_a_catalog_that_was_deleted(tmp_path: Path, foreign: Path) -> None:
    """Its log is kept beside, each under a number of its own, for who wants the file back; its index is worth nothing."""
    path = tmp_path / "catalog.sqlite"
    for _ in range(2):
        made(path, "mine")
        path.unlink()
        for suffix in ("-wal", "-shm"):
            shutil.copy(f"{foreign}{suffix}", f"{path}{suffix}")
        assert opened(path) == set()
    assert names(path) == ["catalog.sqlite", "catalog.sqlite.damaged-1-wal", "catalog.sqlite.damaged-2-wal"]


def test_a_damaged_catalog_is_not_read_with_anothers_log(tmp_path: Path, foreign: Path) -> None:
    """Where a log was set aside before, the file gets the next number; what is salvaged is its own, and no index stays."""
    path = tmp_path / "catalog.sqlite"
    made(path, "mine")
    damage_at(path, spoilt(path))
    for suffix in ("-wal", "-shm"):
        shutil.copy(f"{foreign}{suffix}", f"{path}.damaged-1{suffix}")
    assert opened(path) == {"mine"}
    assert "catalog.sqlite.damaged-2" in names(path) and "catalog.sqlite.damaged-2-shm" not in names(path)
    assert "catalog.sqlite.damaged-1" not in names(path)


def test_a_damaged_catalog_takes_its_own_log_along(tmp_path: Path) -> None:
    """What only the log says is salvaged too, and nothing of it is left where the new catalog stands."""
    path = tmp_path / "catalog.sqlite"
    made(path, "mine")
    page = spoilt(path)
    catalog = Catalog.open(f"sqlite:///{path}")
    catalog.declare_attempt("newest", "one", 1, NOW)
    kept = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
    catalog.close()
    for suffix, data in kept.items():  # as a kill leaves them
        Path(f"{path}{suffix}").write_bytes(data)
    assert kept["-wal"]
    damage_at(path, page)
    assert opened(path) == {"mine", "newest"}
    assert [name for name in names(path) if not name.endswith("-wal")] == ["catalog.sqlite", "catalog.sqlite.damaged-1"]


@pytest.mark.parametrize("revision", ["0001", "0023", "unreleased_0"])
def test_a_catalog_of_an_unreleased_version_is_put_aside(tmp_path: Path, revision: str) -> None:
    """Whole, with its log, under a name that says why; nothing of it is in the new one, and people are told what is lost."""
    path = tmp_path / "catalog.sqlite"
    for number in (1, 2):
        made(path, "mine")
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        before = path.read_bytes()
        found = recovery.open_catalog(f"sqlite:///{path}")
        assert found.catalog.known_runs() == {} and found.salvaged == {}
        found.catalog.close()
        aside = path.with_name(f"catalog.sqlite.revision-{revision}-{number}")
        assert found.set_aside == aside and aside.read_bytes() == before
        assert found.notice is not None and all(word in found.notice for word in (aside.name, "Tokens", "token create"))


def test_a_daemon_tells_of_a_catalog_that_it_put_aside(tmp_path: Path) -> None:
    """Its checkpoints are listed again, and an event says what is lost."""
    root = tmp_path / "root"
    with running(root) as daemon, Checkpointer("run", {"x": torch.ones(3)}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    with closing(sqlite3.connect(root / naming.CATALOG)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0023'")
    with running(root, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        assert [one.step for one in api.checkpoints("run")] == [1]
        told = next(api.events(after=0, kind="catalog-rebuilt"))
        assert told.level == "warning" and "catalog.sqlite.revision-0023-1" in told.text
