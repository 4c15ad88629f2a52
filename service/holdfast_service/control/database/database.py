"""The catalog's database: engine, transactions, and named errors. The stores next to it know the content.

Every call of a store is one transaction. Times are RFC 3339 text from the caller.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    PendingRollbackError,
    ResourceClosedError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable, InvalidRequest, NoSpace
from holdfast_formats.installing import install
from holdfast_service.control.database.engines import HASTY, READ_ONLY, connect, plain, without_password
from holdfast_service.control.database.migrations import migrate
from holdfast_service.control.database.visible import restrict
from holdfast_service.control.signals import Signal

log = logging.getLogger(__name__)

_SQLITE_FULL = "database or disk is full"  # Python 3.10 does not give the error code
STUCK_S = 3.0  # for one transaction; then optional ones are refused
DAMAGED = ("malformed", "not a database", "is damaged")  # Python 3.10 does not give the error code
_WITHOUT_TABLES = ("no such table", "does not exist")
_HINT = (
    "check that its database is running and reachable, then try again: nothing was changed. Saves continue "
    "without it. A damaged SQLite file is rebuilt from the directories when the daemon starts, or by `holdfast "
    "catalog rebuild`"
)
_GOES_ON = "then try again. Nothing was changed; saves continue without it"
_SQLITE_HINTS = {
    "database is locked": f"another program is writing to the catalog's file: wait until it ends, {_GOES_ON}",
    "unable to open": "check that the daemon may open the catalog's file, and that its path has fewer than 500 bytes, "
    f"as SQLite demands, {_GOES_ON}",
    "readonly database": f"the daemon may not write to the catalog's file: check its owner, mode and mount, {_GOES_ON}",
}
_MET_HINT = "another client wrote the same entry at the same time: try again. If it persists, run `holdfast catalog check`"


class Trouble(NamedTuple):
    """Why the catalog is away, and since when, by `time.time()`. `reads`: it cannot be read either."""

    since: float
    why: str
    reads: bool


class Database:
    """The tables at one URL. Thread-safe: a session per transaction.

    While it is known to be away, `trouble` is the reason, and every query is refused at once; only the keeper's thread
    retries.
    """

    def __init__(self, engine: Engine, prepared: bool = True) -> None:
        self.engine = engine
        self._reading = engine.execution_options(**{READ_ONLY: True})
        self._hasty = engine.execution_options(**{HASTY: True})
        self._plain: Engine | None = None  # created on first use
        self._plain_lock = threading.Lock()
        self._prepared = prepared
        self._file = self._identity() if prepared else None
        self.keeper_since: float | None = None  # time.monotonic(), while the keeper is in a transaction
        self.trouble: Trouble | None = None
        self.entering: Signal[[]] = Signal()  # before a transaction of another thread: the keeper writes what is queued
        self.missed: Signal[[]] = Signal()  # a write was lost: the keeper restores it from storage
        self._keeper: threading.Thread | None = None

    @classmethod
    def at(cls, url: str) -> Database:
        """The database at `url`, not contacted before `prepare`. `InvalidRequest`."""
        try:
            database = cls(connect(url), prepared=False)
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
            raise InvalidRequest(
                f"{without_password(url)!r} is not a valid catalog URL: {_without(url, error)}",
                hint=f"use sqlite:///path or postgresql://… ({install('postgres')})",
            ) from None  # the cause would show the password
        if database.is_shared and "@" in (database.engine.url.database or ""):
            raise InvalidRequest(
                "the catalog URL is not valid: its database has an @ in its name",
                hint="percent-encode special characters of the password: %40 is @, %2F is /, %23 is #",
            )
        return database

    @classmethod
    def open(cls, url: str) -> Database:
        """The database at `url`, created or migrated to the newest version first. `InvalidRequest`, `CatalogUnavailable`."""
        database = cls.at(url)
        try:
            database.prepare()
        except BaseException:
            database.engine.dispose()
            raise
        return database

    def prepare(self) -> None:
        """Create or migrate it to the newest version. Connections to a previous file are closed."""
        self.engine.dispose()
        with translated():
            migrate(self.engine)
        self._prepared, self._file = True, self._identity()

    @property
    def unsound(self) -> bool:
        """Whether it has to be prepared before use: never done, replaced, or reported as damaged."""
        why = self.trouble.why if self.trouble is not None else ""
        return not self._prepared or self.replaced or any(word in why for word in (*DAMAGED, *_WITHOUT_TABLES))

    @property
    def replaced(self) -> bool:
        """Whether the path of the open SQLite file now has another file, or none."""
        return self._prepared and self._identity() != self._file

    def _identity(self) -> tuple[int, int] | None:
        if self.engine.dialect.name == "sqlite" and self.engine.url.database not in (None, "", ":memory:"):
            with suppress(OSError):
                status = os.stat(str(self.engine.url.database))
                return status.st_dev, status.st_ino
        return None

    def keep(self) -> None:
        """The calling thread is the keeper from now on."""
        self._keeper = threading.current_thread()

    def away(self, why: str, reads: bool) -> None:
        """It does not answer, perhaps since an earlier call."""
        self.trouble = Trouble(time.time() if self.trouble is None else self.trouble.since, why, reads)

    def back(self) -> None:
        """It answers again."""
        self.trouble = None

    @property
    def url(self) -> str:
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        self.engine.dispose()
        if self._plain is not None:
            self._plain.dispose()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads, only visible runs (`visible`); it waits for no writer."""
        with self._entered(reads=True), translated(), Session(self._reading) as session:
            restrict(session)
            yield session

    @contextmanager
    def write(self, hasty: bool = False) -> Iterator[Session]:
        """A transaction that commits at the end of the block, or changes nothing.

        It is durable when the block has ended. A `hasty` one may be lost in a power cut, though never before an earlier one:
        for what can be restored from the directories, and what no decision depends on.
        """
        engine = self._hasty if hasty else self.engine
        with self._entered(reads=False), translated(), Session(engine) as session, session.begin():
            yield session

    def check_writable(self) -> None:
        """`CatalogUnavailable` or `NoSpace` where nothing can be written; call it before storage is changed."""
        with self.write() as session:
            session.execute(select(1))

    @contextmanager
    def told_later(self, what: str) -> Iterator[None]:
        """The block records what storage already shows. A failure is not raised: the keeper reads it from storage when the
        database is writable again.
        """
        try:
            yield
        except (CatalogUnavailable, NoSpace) as error:
            log.warning("%s: will be recorded when the catalog is writable again: %s", what, error.detail)
            self.missed.publish()

    @contextmanager
    def apart(self, hopeful: bool = False) -> Iterator[Session]:
        """As `write`, for what nodes exchange: it does not wait for this node's queued records.

        Refused at once while the database is known to be away, or has not answered its keeper for a while, unless the caller
        is `hopeful` and tries anyway.
        """
        self._refuse_if_away(hopeful)
        with translated(), Session(self.engine) as session, session.begin():
            yield session

    @contextmanager
    def plain(self) -> Iterator[Connection]:
        """As `apart`, for single statements that autocommit. The cheapest way to query a server."""
        self._refuse_if_away()
        with self._plain_lock:
            if self._plain is None:
                self._plain = plain(self.engine)
        with translated(), self._plain.connect() as connection:
            yield connection

    def _refuse_if_away(self, hopeful: bool = False) -> None:
        since = self.keeper_since
        stuck = since is not None and time.monotonic() - since > STUCK_S
        if not hopeful and (self.trouble is not None or stuck):
            raise CatalogUnavailable(self.trouble.why if self.trouble else "the catalog has not responded yet", hint=_HINT)
        if not self._prepared:
            raise CatalogUnavailable("the catalog has not responded since the daemon started", hint=_HINT)

    @property
    def is_shared(self) -> bool:
        """Whether daemons of several nodes can use it at once: a server, not a file."""
        return self.engine.dialect.name == "postgresql"

    @contextmanager
    def _entered(self, reads: bool) -> Iterator[None]:
        if threading.current_thread() is not self._keeper:
            self.entering.publish()
            trouble = self.trouble
            if trouble is not None and (trouble.reads or not reads):
                raise CatalogUnavailable(trouble.why, hint=_HINT)
            if not self._prepared:
                raise CatalogUnavailable("the catalog has not responded since the daemon started", hint=_HINT)
            yield
            return
        self.keeper_since = time.monotonic()
        try:
            yield
        finally:
            self.keeper_since = None


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of the database or its driver into named errors with advice."""
    try:
        yield
    except (DataError, OverflowError, UnicodeEncodeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InvalidRequest(f"the catalog cannot store this: {_first_line(cause)}") from error
    except (DBAPIError, PoolTimeoutError, ResourceClosedError, PendingRollbackError) as error:
        cause = getattr(error, "orig", None) or error
        if _SQLITE_FULL in str(cause):
            raise NoSpace(f"the catalog: {cause}", hint="free space, or keep fewer checkpoints") from error
        raise CatalogUnavailable(f"the catalog: {_first_line(cause)}", hint=_hint(error, str(cause))) from error


def _hint(error: Exception, cause: str) -> str:
    """Advice for the error; nothing was changed, in every case."""
    if isinstance(error, IntegrityError):
        return _MET_HINT
    return next((hint for text, hint in _SQLITE_HINTS.items() if text in cause), _HINT)


def _first_line(cause: object) -> str:
    return str(cause).partition("\n")[0] or type(cause).__name__


def _without(url: str, error: Exception) -> str:
    """The error's text without the address."""
    return str(error).replace(url, without_password(url))
