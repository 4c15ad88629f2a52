"""Create the database engine: settings that make SQLite and PostgreSQL behave alike."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError

from holdfast_formats.errors import InvalidRequest

BUSY_TIMEOUT_S = 10  # how long a transaction waits for another one's locks
CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 12.0  # a stopped or unreachable server keeps its connections open and sends nothing
IDLE_TIMEOUT_S = 60  # a node that stops in the middle of a transaction holds up the others no longer
CONNECTIONS = 8
PLAIN_CONNECTIONS = 2
CONNECTIONS_MORE = 40  # at most so many besides, for as long as they are used
POSTGRESQL = "postgresql+psycopg"  # also where a URL names no driver
ENCODING = "UTF8"
SWITCH_AGAIN_S = 0.005
PORT = 5432  # of PostgreSQL, where a URL names none
READ_ONLY = "holdfast_read_only"
HASTY = "holdfast_hasty"


def connect(url: str) -> Engine:
    """An engine for `url`. On SQLite, writing transactions take the write lock as they begin, so none can deadlock."""
    made = make_url(url)
    if made.get_backend_name() == "postgresql":
        return _postgresql(made)
    pooled = made.get_backend_name() == "sqlite" and made.database not in (None, "", ":memory:")
    engine = create_engine(made, hide_parameters=True, **({"pool_timeout": BUSY_TIMEOUT_S} if pooled else {}))
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def without_password(url: str) -> str:
    """The URL without its password; accepts any text."""
    try:
        made = make_url(url)
        shown = made.update_query_dict({"password": "***"}) if "password" in made.query else made
        return shown.render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # ValueError: its port is no number
        return re.sub(r"//.*@", "//***@", url)


def address(url: str) -> str:
    """A database's identity for all clients that use this host name: without user, password, driver and options."""
    made = make_url(url)
    where = URL.create(made.get_backend_name(), host=made.host, port=made.port or PORT, database=made.database)
    return where.render_as_string(hide_password=True)


def _postgresql(url: URL) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername=POSTGRESQL)
    given = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_TIMEOUT_S}
    engine = create_engine(
        url,
        hide_parameters=True,
        isolation_level="READ COMMITTED",  # what waited for a row's lock sees what the one before it did
        pool_pre_ping=True,  # a server that was started again is found again
        pool_size=CONNECTIONS,
        max_overflow=CONNECTIONS_MORE,
        pool_timeout=BUSY_TIMEOUT_S,
        connect_args=given,
    )
    return _listening(engine)


def plain(engine: Engine) -> Engine:
    """Connections to the same server for statements that stand alone: one message each, and no transaction around it.

    A connection that the server has ended is noticed by the first statement on it, which fails.
    """
    made = create_engine(
        engine.url,
        hide_parameters=True,
        isolation_level="AUTOCOMMIT",
        pool_size=PLAIN_CONNECTIONS,
        max_overflow=CONNECTIONS_MORE,
        pool_timeout=BUSY_TIMEOUT_S,
        connect_args={} if "connect_timeout" in engine.url.query else {"connect_timeout": CONNECT_TIMEOUT_S},
    )
    return _listening(made)


def _listening(engine: Engine) -> Engine:
    event.listen(engine, "do_connect", _connect_postgresql)
    event.listen(engine, "connect", _prepare_postgresql)
    return engine


def _connect_postgresql(dialect: Any, record: Any, arguments: Any, options: Any) -> Any:
    """Connect, with a timeout for an unresponsive server: the driver has none."""
    import psycopg

    class Answered(psycopg.Connection[Any]):
        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            if timeout is not None:  # a listener, which waits for messages only so long
                return super().wait(gen, interval=interval, timeout=timeout)
            try:
                return super().wait(gen, interval=interval, timeout=ANSWER_TIMEOUT_S)
            except psycopg.errors._WaitTimeout as error:
                self.pgconn.finish()
                raise psycopg.OperationalError(
                    f"the database server has not answered for {ANSWER_TIMEOUT_S:.0f} s"
                ) from error

    connection = Answered.connect(*arguments, **options)
    encoding, name = connection.info.parameter_status("server_encoding"), connection.info.dbname
    if encoding not in (None, ENCODING):
        connection.close()
        raise InvalidRequest(
            f"the database {name!r} has encoding {encoding}, but the catalog needs {ENCODING}",
            hint=f"create another database: CREATE DATABASE holdfast ENCODING '{ENCODING}' TEMPLATE template0",
        )
    return connection


def _prepare_postgresql(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{BUSY_TIMEOUT_S}s'")
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'")
    connection.commit()


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver would begin transactions at a moment of its own
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000}").close()
    _switch_to_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON").close()


def _switch_to_wal(connection: Any) -> None:
    """Enable write-ahead logging, which two connections may do at once for a new file.

    Each holds a lock that the other one waits for: SQLite detects that and refuses one of them at once, whatever its
    `busy_timeout`.
    """
    give_up = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(SWITCH_AGAIN_S)


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get(READ_ONLY, False):
        connection.exec_driver_sql("BEGIN")
        return
    # FULL syncs the log before a commit returns; with NORMAL a power cut may lose the newest ones, and never tears the file.
    wanted = "NORMAL" if options.get(HASTY, False) else "FULL"
    if connection.info.get("synchronous") != wanted:
        connection.exec_driver_sql(f"PRAGMA synchronous = {wanted}")
        connection.info["synchronous"] = wanted
    connection.exec_driver_sql("BEGIN IMMEDIATE")
