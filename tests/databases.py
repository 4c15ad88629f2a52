"""Databases that the tests start: a SQLite file, and a real PostgreSQL server of the test session's own."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.database import Database
from tests.daemons import free_port

KINDS = ("sqlite", "postgresql")
START_TIMEOUT_S = 240.0
PACKAGES = "Debian's package postgresql, and psycopg (pip install 'psycopg[binary]')"
MIGRATED = "holdfast"
_SERVER_USER = "postgres"  # the server refuses to run as root
_BINARIES = Path("/usr/lib/postgresql")
_numbers = itertools.count(1)


class Postgres:
    """A PostgreSQL server on a free port of the loopback, gone with this process."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries, self._directory = binaries, directory
        self._free: list[str] = []
        self.port = free_port()
        # A locale of people, not of machines: what is compared as text has to say how.
        locale = ("--locale-provider=icu", "--icu-locale=en-US") if int(binaries.parent.name) >= 15 else ("--no-locale",)
        self._run("initdb", "-D", f"{directory}/data", "-A", "trust", "-U", "postgres", "-E", "UTF8", *locale, "--no-sync")
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        flags = ("-p", str(self.port), "-k", str(self._directory), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off")
        with open(self._directory / "log", "ab") as log:
            command = [*_as_server(), str(self._binaries / "postgres"), "-D", f"{self._directory}/data", *flags]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        limit = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < limit, "the database server did not come up"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it at once; committed transactions are there at the next start."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the server and to all of its processes."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in (self._process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://postgres:secret@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str) -> None:
        """Run one statement as the superuser, outside of any transaction."""
        import psycopg

        with psycopg.connect(self.url().replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(statement.encode())

    def make(self, template: str = "template1") -> str:
        """The URL of a new database."""
        name = f"catalog_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def take(self) -> str:
        """The URL of a database with the catalog's tables, all of them empty."""
        return self._free.pop() if self._free else self.make(MIGRATED)

    def give_back(self, url: str) -> None:
        """Empty a database, for the next one who takes one; one that cannot be emptied is dropped."""
        import psycopg

        # TRUNCATE would make the files of all tables again, which takes three times as long.
        tables = [table.name for table in reversed(CatalogTable.metadata.sorted_tables)]
        emptied = [f"LOCK TABLE {', '.join(tables)}", *(f"DELETE FROM {table}" for table in tables)]
        used = "SELECT sequencename FROM pg_sequences WHERE last_value IS NOT NULL"
        try:
            with psycopg.connect(url.replace("+psycopg", "")) as connection:
                connection.execute("SET lock_timeout = '1s'; SET session_replication_role = replica")  # triggers add rows
                connection.execute("; ".join(emptied).encode())
                for (sequence,) in connection.execute(used).fetchall():
                    connection.execute(f"ALTER SEQUENCE {sequence} RESTART".encode())
        except psycopg.Error:
            self.drop(url)
        else:
            self._free.append(url)

    def _answers(self) -> bool:
        import psycopg

        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        command = [*_as_server(), str(self._binaries / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/")


def _as_server() -> list[str]:
    """Words of a command that run what follows as a user who may be a server, and end it with this process."""
    user = ["--reuid", _SERVER_USER, "--regid", _SERVER_USER, "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, "--pdeathsig", "QUIT"]


def why_not() -> str | None:
    """Why no PostgreSQL can be started here, None when it can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return f"needs {PACKAGES}"
    if not list(_BINARIES.glob("*/bin/initdb")) or shutil.which("setpriv") is None:
        return f"needs {PACKAGES}"
    return None


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server for the length of a block, with a database that has the catalog's tables."""
    binaries = max(_BINARIES.glob("*/bin"), key=lambda path: int(path.parent.name))
    directory = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, _SERVER_USER, _SERVER_USER)
        server = Postgres(binaries, directory)
        try:
            server.execute(f"CREATE DATABASE {MIGRATED}")
            Database.open(server.url(MIGRATED)).close()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The session's PostgreSQL server; a test that needs it is skipped where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    with running_postgres() as server:
        yield server


@functools.cache
def _empty_catalog() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.sqlite"
        Database.open(f"sqlite:///{path}").close()
        return path.read_bytes()


@pytest.fixture(scope="session")
def empty_catalog() -> bytes:
    """A SQLite catalog without a row."""
    return _empty_catalog()


def sqlite_url(path: str | Path) -> str:
    """The URL of a SQLite catalog; where no file is, a copy of an empty one is put there, since migrations take long."""
    place = Path(path)
    if not place.exists():
        place.write_bytes(_empty_catalog())
    return f"sqlite:///{place}"


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty catalog, on every kind of database in turn."""
    if request.param == "sqlite":
        yield sqlite_url(request.getfixturevalue("tmp_path") / "catalog.sqlite")
        return
    server = request.getfixturevalue("postgres")
    url = server.take()
    yield url
    server.give_back(url)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty catalog's database, open, on every kind of database in turn."""
    opened = Database.open(database_url)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_database(tmp_path: Path) -> Iterator[Database]:
    """An empty catalog's database, open, on SQLite: for what asks nothing that differs between databases."""
    opened = Database.open(sqlite_url(tmp_path / "catalog.sqlite"))
    yield opened
    opened.close()


@pytest.fixture
def sqlite_catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty catalog on SQLite."""
    opened = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    yield opened
    opened.close()
