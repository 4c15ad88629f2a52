"""The catalog's database: one engine, its transactions, and its failures by name. The stores beside it know what it holds.

Every call of a store is one transaction. Times are RFC 3339 text that the caller gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, ResourceClosedError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from holdfast_formats.errors import InvalidRequest, NoSpace, StorageFailed

from .engines import HASTY, READ_ONLY, connect, without_password
from .migrations import migrate
from .visible import restrict

_SQLITE_FULL = "database or disk is full"  # Python 3.10 does not give the error code
_HINT = (
    "is its database up and reachable? Then try again: nothing was changed. A SQLite file that is damaged is made anew from "
    "the directories when the daemon starts, or by `holdfast catalog rebuild`"
)


class Database:
    """The tables at one URL. Thread-safe: a session a transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reading = engine.execution_options(**{READ_ONLY: True})
        self._hasty = engine.execution_options(**{HASTY: True})

    @classmethod
    def open(cls, url: str) -> Database:
        """The database at `url`, made or brought to the newest version first. `InvalidRequest`, `StorageFailed`."""
        try:
            engine = connect(url)
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
            raise InvalidRequest(
                f"{without_password(url)!r} is not a catalog's address: {_without(url, error)}",
                hint="use sqlite:///path or postgresql://… (pip install 'holdfast-checkpoint[postgres]')",
            ) from None  # the cause would show the password
        try:
            with _translated():
                migrate(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    @property
    def url(self) -> str:
        """Where it is, without the password."""
        return self.engine.url.render_as_string(hide_password=True)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that reads only, and of the visible runs alone (`visible`); it waits for no writer."""
        with _translated(), Session(self._reading) as session:
            restrict(session)
            yield session

    @contextmanager
    def write(self, hasty: bool = False) -> Iterator[Session]:
        """A transaction that commits at the end of the block, or changes nothing.

        It is durable when the block has ended. A `hasty` one may be lost in a power cut, though never before one that was
        made earlier: for what the directories tell again, and what nobody acts upon.
        """
        with _translated(), Session(self._hasty if hasty else self.engine) as session, session.begin():
            yield session


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the database or its driver reports into the named error that says what to do."""
    try:
        yield
    except (DataError, OverflowError, UnicodeEncodeError) as error:
        cause = getattr(error, "orig", None) or error
        raise InvalidRequest(f"the catalog cannot hold this: {_first_line(cause)}") from error
    except (DBAPIError, PoolTimeoutError, ResourceClosedError) as error:
        cause = getattr(error, "orig", None) or error
        if _SQLITE_FULL in str(cause):
            raise NoSpace(f"the catalog: {cause}", hint="free space, or keep fewer checkpoints") from error
        raise StorageFailed(f"the catalog: {_first_line(cause)}", hint=_HINT) from error


def _first_line(cause: object) -> str:
    return str(cause).partition("\n")[0] or type(cause).__name__


def _without(url: str, error: Exception) -> str:
    """What the error says, without the address in it."""
    return str(error).replace(url, without_password(url))
