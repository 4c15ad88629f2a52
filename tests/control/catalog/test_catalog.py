"""The catalog answers as the contract says, from many threads, over a restart, and from any version of itself."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, text

from holdfast_formats.errors import (
    InvalidRequest,
    LimitExceeded,
    NoSpace,
    NoSuchCheckpoint,
    NoSuchRun,
    StateMismatch,
    StorageFailed,
)
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.pages import PAGE_ITEMS_MAX
from holdfast_service.control.database import migrations
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import connect
from tests.control.published import a_row

TABLES = ("unreleased_6", "8ddb3d3e")  # the version, and a digest of its tables
NOW, LATER = "2030-01-01T00:00:00.000Z", "2030-01-01T00:00:09.000Z"


@pytest.fixture
def path(tmp_path: Path, empty_catalog: bytes) -> Path:
    file = tmp_path / "catalog.sqlite"
    file.write_bytes(empty_catalog)
    return file


def set_version(path: Path, version: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))


class TestOpening:
    """A catalog is brought to the newest version, once."""

    def test_contents_survive(self, path: Path) -> None:
        """What was recorded is there after a restart."""
        first = Catalog.open(f"sqlite:///{path}")
        first.declare_attempt("run", "launch", 2, NOW)
        first.record_checkpoint(a_row("run", 5))
        first.close()
        second = Catalog.open(f"sqlite:///{path}")
        assert second.checkpoint("run", 5) == a_row("run", 5)
        assert second.newest_attempt("run") == 1
        second.close()

    def test_up_to_date_catalog_needs_no_alembic(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Opening what is at the newest version runs no migration: a daemon starts inside somebody's first save."""

        def refuse(*_: object) -> None:
            raise AssertionError("nothing to migrate")

        monkeypatch.setattr(command, "upgrade", refuse)
        Catalog.open(f"sqlite:///{path}").close()

    def test_migrations_make_the_declared_tables(self, path: Path) -> None:
        """The schema that the migrations leave is the one that the code declares, and HEAD is the newest of them."""
        engine = connect(f"sqlite:///{path}")
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), CatalogTable.metadata) == []
        engine.dispose()
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        assert ScriptDirectory.from_config(config).get_heads() == [migrations.HEAD]

    def test_other_tables_have_another_version(self, path: Path) -> None:
        """Until the first release `schema` is the only statement of the tables: HEAD says that they are others."""
        with closing(sqlite3.connect(path)) as connection:
            columns = connection.execute(
                'SELECT t.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master t, pragma_table_info(t.name) c '
                "WHERE t.type = 'table' ORDER BY t.name, c.cid"
            ).fetchall()
        digest = hashlib.sha256(repr(columns).encode()).hexdigest()[:8]
        assert (migrations.HEAD, digest) == TABLES, "other tables: give HEAD the next number, and state both"

    @pytest.mark.parametrize("opened", [Catalog.open, recovery.open_catalog])
    def test_catalog_of_a_newer_version_is_refused(self, path: Path, opened: Callable[[str], object]) -> None:
        """A version this one does not know is named, and left as it is."""
        set_version(path, "0.2.0")
        with pytest.raises(StateMismatch, match=r"0\.2\.0"):
            opened(f"sqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0.2.0",)

    def test_a_server_with_tables_of_an_unreleased_version_is_refused(self, database: Database) -> None:
        """Daemons of other nodes may use them: the error has the lines with which an operator puts them away."""
        with database.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '0023'"))
        try:
            with pytest.raises(StateMismatch, match="revision 0023") as refused:
                database.prepare()
            assert ("ALTER DATABASE" if database.is_shared else "catalog rebuild") in refused.value.hint
            with database.read() as session:
                assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0023"
        finally:
            with database.write() as session:
                session.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": migrations.HEAD})

    def test_what_is_no_catalog_is_named(self, tmp_path: Path) -> None:
        """A damaged file and an impossible directory are StorageFailed, a wrong address InvalidRequest."""
        (tmp_path / "damaged").write_bytes(b"not a database" * 100)
        for url in (f"sqlite:///{tmp_path}/damaged", f"sqlite:///{tmp_path}/missing/catalog"):
            with pytest.raises(StorageFailed):
                Catalog.open(url)
        for url in ("", "nonsense", "nosuchdatabase://host/name"):
            with pytest.raises(InvalidRequest):
                Catalog.open(url)

    def test_full_disk_is_named(self, path: Path) -> None:
        """When the catalog cannot grow it says NoSpace, and what was recorded before stays."""
        catalog = Catalog.open(f"sqlite:///{path}")
        catalog.set_keep_last("run", 3)
        catalog.close()
        event.listen(catalog.database.engine, "connect", lambda made, _: made.execute("PRAGMA max_page_count = 1").close())
        with pytest.raises(NoSpace):
            for step in range(1000):
                catalog.record_checkpoint(a_row("run", step))
        assert catalog.keep_last("run") == 3
        catalog.close()

    def test_many_open_a_new_catalog_at_once(self, tmp_path: Path) -> None:
        """Whoever comes first migrates, the others find it done."""
        url = f"sqlite:///{tmp_path}/catalog.sqlite"
        with ThreadPoolExecutor(4) as pool:
            opened = list(pool.map(lambda _: Catalog.open(url), range(4)))
        assert [one.rounds.counts()["open"] for one in opened] == [0, 0, 0, 0]
        for one in opened:
            one.close()

    def test_many_connect_to_a_new_file_at_once(self, tmp_path: Path) -> None:
        """SQLite refuses one of two that switch to write-ahead logging together; nobody here is refused for it."""
        meet = Barrier(8)

        def connected(url: str) -> str:
            engine = connect(url)
            meet.wait()
            try:
                with engine.connect() as connection:
                    return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
            finally:
                engine.dispose()

        with ThreadPoolExecutor(8) as pool:
            for number in range(80):
                url = f"sqlite:///{tmp_path}/{number}.sqlite"
                assert list(pool.map(connected, [url] * 8)) == ["wal"] * 8


class TestAttempts:
    """Launches are numbered, and a number is given out once."""

    def test_ranks_of_a_launch_share_an_attempt(self, catalog: Catalog) -> None:
        """The same launch has the same number, also after a newer one; a new launch has the next."""
        assert catalog.newest_attempt("run") == 0
        assert [catalog.declare_attempt("run", launch, 2, NOW) for launch in ("a", "a", "b", "a", "c")] == [1, 1, 2, 1, 3]
        assert catalog.declare_attempt("other", "a", 2, NOW) == 1
        assert catalog.newest_attempt("run") == 3

    def test_many_threads_declare_at_once(self, catalog: Catalog) -> None:
        """Eight ranks each of four launches get four numbers."""
        with ThreadPoolExecutor(8) as pool:
            given = list(pool.map(lambda n: (n % 4, catalog.declare_attempt("run", f"l{n % 4}", 8, NOW)), range(32)))
        assert len(set(given)) == 4
        assert {attempt for _, attempt in given} == {1, 2, 3, 4}

    def test_answers_stand(self, catalog: Catalog) -> None:
        """The first answer to a question is the answer, None included; another turn or attempt is another question."""
        catalog.declare_attempt("run", "a", 1, NOW)
        assert catalog.answer("run", 1, 0, None) is None
        assert catalog.answer("run", 1, 0, 500) is None
        assert catalog.declared()["run"].answers == {"1.0": None}
        assert catalog.answer("run", 1, 1, 500) == 500
        assert catalog.answer("run", 1, 1, 600) == 500
        assert catalog.answer("run", 2, 0, 600) == 600

    def test_keep_last(self, catalog: Catalog) -> None:
        """The limit is remembered, makes the run known, and can be lifted."""
        assert catalog.keep_last("run") is None
        catalog.set_keep_last("run", 3)
        assert (catalog.keep_last("run"), catalog.run("run").keep_last) == (3, 3)
        catalog.set_keep_last("run", None)
        assert catalog.keep_last("run") is None
        with pytest.raises(InvalidRequest):
            catalog.set_keep_last("run", 0)

    @pytest.mark.parametrize("run", ["", "../x", "a/b", "x" * 129])
    def test_run_names_are_checked(self, catalog: Catalog, run: str) -> None:
        """No name gets in that could not be a directory."""
        with pytest.raises(InvalidRequest):
            catalog.declare_attempt(run, "a", 1, NOW)
        with pytest.raises(InvalidRequest):
            catalog.set_keep_last(run, 1)


class TestCheckpoints:
    """Checkpoints are listed as they were recorded."""

    def test_record_and_forget(self, catalog: Catalog) -> None:
        """A record replaces the one before; what is forgotten is gone, and forgetting twice is fine."""
        catalog.record_checkpoint(a_row("run", 5, verified=True))
        replaced = a_row("run", 5).model_copy(update={"attempt": 7, "metrics": {"größe": 1e-300}, "groups": []})
        catalog.record_checkpoint(replaced)
        assert catalog.checkpoint("run", 5) == replaced
        assert catalog.newest_attempt("run") == 7
        catalog.forget_checkpoint("run", 5)
        catalog.forget_checkpoint("run", 5)
        with pytest.raises(NoSuchCheckpoint):
            catalog.checkpoint("run", 5)

    def test_what_is_not_there_is_named(self, catalog: Catalog) -> None:
        """An unknown run is told apart from an unknown step, and from a step that cannot be."""
        catalog.set_keep_last("run", None)
        with pytest.raises(NoSuchCheckpoint):
            catalog.checkpoint("run", 5)
        for call in (
            lambda: catalog.checkpoint("other", 5),
            lambda: catalog.checkpoints("other", None, 10),
            lambda: catalog.run("other"),
        ):
            with pytest.raises(NoSuchRun):
                call()
        with pytest.raises(InvalidRequest):
            catalog.checkpoint("run", 10**30)

    def test_pages_are_stable_under_inserts(self, catalog: Catalog) -> None:
        """Newest step first; what is committed between two pages moves nothing."""
        for step in (10, 20, 30, 40, 50):
            catalog.record_checkpoint(a_row("run", step))
        first = catalog.checkpoints("run", None, 2)
        catalog.record_checkpoint(a_row("run", 60))
        catalog.forget_checkpoint("run", 40)
        second = catalog.checkpoints("run", first.next, 2)
        third = catalog.checkpoints("run", second.next, 2)
        assert [one.step for page in (first, second, third) for one in page.items] == [50, 40, 30, 20, 10]
        assert third.next is None

    def test_full_last_page_has_no_next(self, catalog: Catalog) -> None:
        """A page that ends with the last checkpoint says so."""
        for step in (1, 2):
            catalog.record_checkpoint(a_row("run", step))
        assert catalog.checkpoints("run", None, 2).next is None

    @pytest.mark.parametrize(
        "cursor", ["", "x", "!!!!", "cnVuOmE=", "c3RlcDo=", "c3RlcDotMQ==", "c3RlcDo5OTk5OTk5OTk5OTk5OTk5OTk5", "ä"]
    )
    def test_bad_cursors_are_refused(self, catalog: Catalog, cursor: str) -> None:
        """Garbage, another list's cursor and impossible numbers are InvalidRequest."""
        catalog.set_keep_last("run", None)
        with pytest.raises(InvalidRequest, match="cursor"):
            catalog.checkpoints("run", cursor, 10)

    def test_page_sizes_are_bounded(self, catalog: Catalog) -> None:
        """At least one item, at most a thousand."""
        catalog.set_keep_last("run", None)
        with pytest.raises(InvalidRequest):
            catalog.checkpoints("run", None, 0)
        with pytest.raises(LimitExceeded):
            catalog.checkpoints("run", None, PAGE_ITEMS_MAX + 1)
        assert catalog.checkpoints("run", None, PAGE_ITEMS_MAX).items == []

    def test_newest_has_the_groups(self, catalog: Catalog) -> None:
        """The newest step is the newest that has all that is asked for."""
        catalog.record_checkpoint(a_row("run", 10, groups=("model", "optim", "extra")))
        catalog.record_checkpoint(a_row("run", 20, groups=("model", "optim")))
        catalog.record_checkpoint(a_row("run", 30, groups=("model",)))
        assert catalog.newest("run") == 30
        assert catalog.newest("run", ["optim"]) == 20
        assert catalog.newest("run", {"extra", "model"}) == 10
        assert catalog.newest("run", ["ema"]) is None
        assert catalog.newest("other") is None

    def test_runs_are_counted(self, catalog: Catalog) -> None:
        """A run tells its checkpoints, their bytes and the newest; one without any tells none."""
        for step in (1, 2):
            catalog.record_checkpoint(a_row("b", step))
        catalog.declare_attempt("a", "launch", 1, NOW)
        for name in ("c", "d"):
            catalog.set_keep_last(name, 4)
        run = catalog.run("b")
        assert (run.name, run.checkpoints, run.newest, run.bytes, run.attempt) == ("b", 2, 2, 4, 1)
        empty = catalog.run("a")
        assert (empty.checkpoints, empty.newest, empty.bytes, catalog.run("d").keep_last) == (0, None, 0, 4)
