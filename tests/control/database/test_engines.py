"""What a database does to its users: it is shared, it refuses, it goes away and comes back. The catalog holds up."""

from __future__ import annotations

import base64
import logging
import multiprocessing
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    InvalidRequest,
    NoSuchCheckpoint,
    NoSuchRun,
    StorageFailed,
)
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database, translated
from holdfast_service.control.database.engines import address, without_password
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.storage import MemoryTier, stored_in
from tests.control.published import a_row
from tests.databases import Postgres

NOW = "2030-01-01T00:00:00.000Z"
PROCESS = multiprocessing.get_context("forkserver")
PROCESS.set_forkserver_preload([__name__])  # imported once for all processes
PROCESSES, THREADS, LAUNCHES = 3, 4, 3


def names(catalog: Catalog, prefix: str = "", cursor: str | None = None, limit: int = 10) -> bodies.Page[str]:
    """A page of the names of runs."""
    return Summaries(stored_in(MemoryTier()).store, catalog).names(cursor, limit, WantedRuns(prefix))


def declare_and_open(url: str) -> list[tuple[str, int, int]]:
    """What one process gets: of every launch its attempt, and the round of a step of that attempt."""
    catalog = Catalog.open(url)

    def one(number: int) -> tuple[str, int, int]:
        launch = f"launch-{number % LAUNCHES}"
        attempt = catalog.declare_attempt("run", launch, 1, NOW)
        return launch, attempt, catalog.rounds.open("shared", 5, 1, 1, NOW)[0]

    with ThreadPoolExecutor(THREADS) as pool:
        given = list(pool.map(one, range(4 * LAUNCHES)))
    catalog.close()
    return given


def test_processes_and_threads_get_one_answer(database_url: str) -> None:
    """I6: however many nodes ask at once, a launch has one attempt, and a step one round."""
    with PROCESS.Pool(PROCESSES) as pool:
        given = [answer for answers in pool.map(declare_and_open, [database_url] * PROCESSES) for answer in answers]
    assert len(given) == PROCESSES * 4 * LAUNCHES
    attempts = {(launch, attempt) for launch, attempt, _ in given}
    assert sorted(attempt for _, attempt in attempts) == list(range(1, LAUNCHES + 1))
    assert len({round_id for _, _, round_id in given}) == 1


def open_and_close(url: str) -> str:
    try:
        Catalog.open(url).close()
    except CheckpointError as error:
        return str(error)
    return ""


def test_nodes_that_start_at_once_migrate_once(postgres: Postgres) -> None:
    """Whoever comes first makes the tables, the others wait for it."""
    url = postgres.make()
    with PROCESS.Pool(4) as pool:
        assert pool.map(open_and_close, [url] * 4) == [""] * 4
    postgres.drop(url)


class TestWhatNoDatabaseKeeps:
    """Values that one database would keep and the other refuse are refused, or written out, by both."""

    def test_texts_of_any_origin_are_written_out(self, catalog: Catalog) -> None:
        """The message of an error may have the bytes of a file's name in it."""
        made = catalog.rounds.open("run", 5, 1, 1, NOW)[0]
        catalog.rounds.end(made, "aborted", NOW, "storage-failed", "a\0b \udcff größe")
        assert catalog.rounds.page().items[0].detail == "a\\x00b \\udcff größe"
        events = Events(catalog.database, "node", lambda: NOW)
        events.add("save-aborted", "a\0b", "run", 5, problem={"detail": "a\0b \udcff"})
        kept = events.newest(None, 1).items[0]
        assert (kept.text, kept.detail) == ("a\\x00b", {"problem": {"detail": "a\0b \udcff"}})

    def test_numbers_that_are_too_large(self, catalog: Catalog) -> None:
        """They are refused by name, and nothing has changed."""
        with pytest.raises(InvalidRequest):
            catalog.declare_attempt("run", "launch", 2**70, NOW)
        assert catalog.newest_attempt("run") == 0
        with pytest.raises(InvalidRequest):
            catalog.record_checkpoint(a_row("run", 5).model_copy(update={"bytes": 2**64}))
        with pytest.raises(NoSuchRun):
            catalog.checkpoints("run", None, 10)

    @pytest.mark.parametrize("name", ["a\0b", "\udcff", "x" * 1000, "ä"])
    def test_names_that_no_run_has(self, catalog: Catalog, name: str) -> None:
        """Asking for them says that there is no such run; no run's name begins with them."""
        for ask in (catalog.run, lambda run: catalog.checkpoints(run, None, 1), catalog.rounds.page):
            with pytest.raises(NoSuchRun):
                ask(name)
        with pytest.raises((NoSuchRun, NoSuchCheckpoint)):
            catalog.checkpoint(name, 5)
        assert names(catalog, prefix=name).items == []
        cursor = base64.urlsafe_b64encode(f"summary-name:{name}".encode(errors="surrogatepass")).decode()
        with pytest.raises(InvalidRequest, match="cursor"):
            names(catalog, cursor=cursor)

    def test_an_error_within_undoes_what_was_before_it(self, database: Database) -> None:
        """A transaction that fails leaves nothing behind, and the next one goes on."""
        with pytest.raises(InvalidRequest), database.write() as session:
            session.execute(text("INSERT INTO runs (name, attempt) VALUES ('a', 1)"))
            session.execute(text("INSERT INTO runs (name, attempt) VALUES ('b', :n)"), {"n": 2**70})
        with database.read() as session:
            assert session.scalar(text("SELECT count(*) FROM runs")) == 0


class TestOrder:
    """Names and times are compared byte by byte, whatever the database's locale."""

    def test_runs_come_in_the_order_of_their_bytes(self, catalog: Catalog) -> None:
        """Upper case before lower case, and a prefix finds exactly what begins with it; pages of one find all."""
        runs = ["B-1", "B", "a.b", "a", "a-b", "a_b", "ab", "Z", "z1", "z10", "z2"]
        for name in runs:
            catalog.set_keep_last(name, None)
        found, cursor = [], None
        while True:
            page = names(catalog, cursor=cursor, limit=1)
            found += page.items
            cursor = page.next
            if cursor is None:
                break
        assert found == sorted(runs)
        assert names(catalog, "a").items == ["a", "a-b", "a.b", "a_b", "ab"]
        assert names(catalog, "z1").items == ["z1", "z10"]
        assert names(catalog, "c").items == []


class TestDurability:
    """What may be lost in a power cut, and what may not."""

    def test_attempts_are_synced_and_listings_are_not(self, catalog: Catalog) -> None:
        """I6: the log is synced before a number is given out; what the directories tell again does not wait for a disk."""
        if catalog.database.engine.dialect.name != "sqlite":
            pytest.skip("PostgreSQL syncs every commit by itself")
        levels: list[int] = []

        def level() -> int:
            connection = catalog.database.engine.raw_connection()
            try:
                return int(connection.cursor().execute("PRAGMA synchronous").fetchone()[0])  # type: ignore[index]
            finally:
                connection.close()

        catalog.declare_attempt("run", "a", 1, NOW)
        levels.append(level())
        catalog.rounds.open("run", 5, 1, 1, NOW)
        levels.append(level())
        catalog.declare_attempt("run", "b", 1, NOW)
        levels.append(level())
        catalog.record_checkpoint(a_row("run", 5))
        levels.append(level())
        catalog.answer("run", 1, 0, 5)
        levels.append(level())
        assert levels == [FULL, NORMAL, FULL, NORMAL, FULL]


FULL, NORMAL = 2, 1


class TestPostgres:
    """A server that goes away, and who may know its password."""

    @pytest.fixture
    def url(self, postgres: Postgres) -> Iterator[str]:
        made = postgres.take()
        yield made
        postgres.give_back(made)

    def test_a_url_without_a_driver_is_enough(self, url: str) -> None:
        """`postgresql://…`, as everybody writes it."""
        catalog = Catalog.open(url.replace("+psycopg", ""))
        assert catalog.declare_attempt("run", "a", 1, NOW) == 1
        catalog.close()

    def test_a_connection_that_was_cut_is_made_again(self, postgres: Postgres, url: str) -> None:
        """Between two calls nobody notices; within one it fails, retryable, changes nothing, and the next one works."""
        catalog = Catalog.open(url)
        name = url.rpartition("/")[2]
        cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        assert catalog.declare_attempt("run", "a", 1, NOW) == 1
        postgres.execute(cut)
        assert catalog.declare_attempt("run", "b", 1, NOW) == 2
        with pytest.raises(StorageFailed) as caught, catalog.database.write() as session:
            session.execute(text("UPDATE runs SET attempt = 9"))
            postgres.execute(cut)
            session.execute(text("UPDATE runs SET attempt = 10"))
        assert caught.value.retryable
        assert catalog.declare_attempt("run", "c", 1, NOW) == 3
        catalog.close()

    def test_a_server_that_is_down_is_named_and_found_again(self, postgres: Postgres, url: str) -> None:
        """While it is down every call says so; when it is up again the same catalog goes on."""
        catalog = Catalog.open(url)
        catalog.declare_attempt("run", "a", 1, NOW)
        postgres.stop()
        try:
            for _ in range(2):
                with pytest.raises(StorageFailed) as caught:
                    catalog.declare_attempt("run", "b", 1, NOW)
            with pytest.raises(StorageFailed):
                Catalog.open(url)
        finally:
            postgres.start()
        assert caught.value.retryable and "secret" not in f"{caught.value}{caught.value.problem()}"
        assert catalog.declare_attempt("run", "b", 1, NOW) == 2
        catalog.close()

    def test_a_lock_that_nobody_lets_go_is_not_waited_for(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node that stopped in the middle of a transaction makes the others fail by name, not hang."""
        monkeypatch.setattr("holdfast_service.control.database.engines.BUSY_TIMEOUT_S", 1)
        first, second = Catalog.open(url), Catalog.open(url)
        first.set_keep_last("run", 3)
        with first.database.write() as session:
            session.execute(text("SELECT * FROM runs WHERE name = 'run' FOR UPDATE"))
            with pytest.raises(StorageFailed) as caught:
                second.declare_attempt("run", "a", 1, NOW)
        assert caught.value.retryable
        assert second.declare_attempt("run", "a", 1, NOW) == 1
        for one in (first, second):
            one.close()

    def test_the_password_is_shown_to_nobody(
        self, url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Neither in errors and their causes, nor in the log, nor where the catalog says where it is."""
        catalog = Catalog.open(url)
        shown = [catalog.database.url, repr(catalog.database.engine)]
        catalog.close()
        for wrong in (
            url.replace("127.0.0.1", "127.0.0.1.invalid"),
            url.replace("+psycopg", "+nosuchdriver"),
            url + "?nosuchoption=1",
            "postgresql+psycopg://postgres:secret@[bad",
        ):
            with caplog.at_level(logging.DEBUG), pytest.raises(CheckpointError) as caught:
                Catalog.open(wrong)
            error: BaseException | None = caught.value
            while error is not None:
                shown.append(f"{error} {error!r}")
                error = error.__cause__
        shown += [caplog.text, *capsys.readouterr(), without_password("://x:secret@host/y")]
        assert [text for text in shown if "secret" in text] == []


def test_a_wrong_address_changes_nothing(tmp_path: Path) -> None:
    """A typing error in the address is named, and makes no file."""
    for url in ("sqlite//x", "postgresq://host/name", "oracle+nothing://host/name"):
        with pytest.raises(InvalidRequest):
            Catalog.open(url)
    assert list(tmp_path.iterdir()) == []


def test_an_address_says_which_database_it_is_and_nothing_else() -> None:
    """The same for all who use it: without user, password, driver and options, wherever a password may stand."""
    plain = "postgresql://db.example:5432/holdfast"
    for url in (
        "postgresql://db.example/holdfast",
        "postgresql+psycopg://me:secret@db.example:5432/holdfast?sslmode=require",
        "postgresql://db.example/holdfast?password=secret",
    ):
        assert address(url) == plain
        assert "secret" not in without_password(url)
    assert address("postgresql://db.example:6000/holdfast") != plain != address("postgresql://db.example/other")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OperationalError("", {}, sqlite3.OperationalError("database is locked")), "another program is writing"),
        (
            OperationalError("", {}, sqlite3.OperationalError("attempt to write a readonly database")),
            "owner, mode and mount",
        ),
        (OperationalError("", {}, sqlite3.OperationalError("unable to open database file")), "fewer than 500 bytes"),
        (IntegrityError("", {}, sqlite3.IntegrityError("UNIQUE constraint failed: runs.name")), "wrote the same"),
        (OperationalError("", {}, Exception("connection refused")), "running and reachable"),
    ],
)
def test_a_refusal_says_what_to_do_about_its_cause(error: Exception, hint: str) -> None:
    with pytest.raises(CatalogUnavailable) as caught, translated():
        raise error
    assert hint in caught.value.hint and "try again" in caught.value.hint
