"""Replace a damaged catalog by a new one, and copy the rows that can still be read. One that an unreleased version made is
replaced as well, without copying.

Only for SQLite files; a database server does its own recovery.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Boolean, Column, Float, Integer, LargeBinary
from sqlalchemy import Table as SqlTable
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from holdfast_formats import naming
from holdfast_formats.errors import StorageFailed
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.columns import CatalogTable, JsonText
from holdfast_service.control.database.database import DAMAGED, Database
from holdfast_service.control.database.migrations import is_unreleased
from holdfast_service.control.database.schema import RunRow
from holdfast_service.storage.posix import set_aside

log = logging.getLogger(__name__)

_UNRELEASED = (
    "the catalog {} was made by an unreleased version of holdfast (revision {}). It was moved to {}, and is "
    "rebuilt from the directories. Tokens, audit log, events and the history of jobs and saves are only in the old "
    "file: create new tokens with `holdfast token create`. Checkpoints are read back and verified again"
)
_LOG, _INDEX = "-wal", "-shm"  # beside the file: what it does not hold yet, and an index of that, which is made again
_COMPUTED = ("run_figures", "run_changes")  # from the rows that are copied
_PARTS = (_LOG, "")  # the log first: a log without its database would be taken for that of a new one
_NUMBERS_MAX = 2**53  # a larger attempt or step was never given out
# What must not be believed of a damaged file: that bytes were proven (I10), and what spares reading them again.
_NOT_BELIEVED = {"checkpoints": {"verified": 0, "check": None, "stamp": None, "proven": None}}


class Opened(NamedTuple):
    """A catalog, and what happened to the unusable one in its place; `notice` says so for people."""

    catalog: Catalog
    set_aside: Path | None = None
    salvaged: dict[str, int] = {}  # noqa: RUF012 - nothing changes it
    notice: str | None = None


def open_sound(url: str, node: str | None = None) -> Catalog:
    """The catalog at `url`, which is not made if it is not there; `StorageFailed` when it is missing or damaged."""
    path = file_of(url)
    if path is not None and not path.exists():
        raise StorageFailed(
            f"there is no catalog {path}", hint="`holdfast catalog rebuild` creates one from the directories"
        )
    catalog = Catalog.open(url, node)
    try:
        if path is not None:
            _quick_check(path, catalog)
    except BaseException:
        catalog.close()
        raise
    return catalog


def open_catalog(url: str, node: str | None = None) -> Opened:
    """The catalog at `url`. A SQLite file that is damaged is moved away first, and a new one gets what was readable of it;
    one of an unreleased version is moved away, too.

    Errors are those of `Catalog.open`. What is listed after this is whatever was: reconcile it with the directories.
    """
    path = file_of(url)
    if path is not None and not path.exists():
        aside = _move_away(path, "damaged")  # a log that was left behind would be taken for that of the new file
        if aside.with_name(aside.name + _LOG).exists():
            log.warning("%s is gone; its remaining write-ahead log is kept as %s%s", path.name, aside.name, _LOG)
        path = None
    if path is None:
        return Opened(Catalog.open(url, node))
    if (revision := _unreleased_revision(path)) is not None:
        aside = _move_away(path, f"revision-{revision}")
        notice = _UNRELEASED.format(path.name, revision, aside.name)
        log.warning("%s", notice)
        return Opened(Catalog.open(url, node), aside, notice=notice)
    try:
        return Opened(open_sound(url, node))
    except StorageFailed as error:
        if not any(word in error.detail for word in DAMAGED):
            raise
        why = error.detail
    aside = _move_away(path, "damaged")
    notice = f"{why}: rebuilding it; the damaged one is kept as {aside.name}"
    log.error("%s", notice)
    catalog = Catalog.open(url, node)
    with closing(sqlite3.connect(aside)) as old:
        old.text_factory = lambda encoded: encoded.decode(errors="replace")
        salvaged = salvage(old, path)
    set_aside(aside.with_name(aside.name + _INDEX), None)
    log.info("rows read from the damaged catalog: %s", salvaged or "nothing")
    return Opened(catalog, aside, salvaged, notice)


def mend(database: Database) -> str | None:
    """As `open_catalog`, for a database in use, which then uses the new file. Returns the notice."""
    database.engine.dispose()
    opened = open_catalog(database.engine.url.render_as_string(hide_password=False))
    opened.catalog.close()
    database.prepare()
    return opened.notice


def salvage(old: sqlite3.Connection, path: Path) -> dict[str, int]:
    """Copy every readable row of the damaged catalog `old` into the new one at `path`; returns counts by table."""
    copied = {}
    with closing(sqlite3.connect(path)) as new:
        for table in CatalogTable.metadata.sorted_tables:
            if table.name in _COMPUTED:
                continue
            with new:
                rows = [row for row in _readable(old, table) if _is_plausible(table, row)]
                number = sum(_insert(new, table, row) for row in rows)
            if number:
                copied[table.name] = number
    return copied


def file_of(url: str) -> Path | None:
    """The file of a SQLite catalog, None for any other."""
    try:
        made = make_url(url)
    except ArgumentError:
        return None
    if made.get_backend_name() != "sqlite" or made.database in (None, "", ":memory:"):
        return None
    return Path(str(made.database))


def _quick_check(path: Path, catalog: Catalog) -> None:
    with catalog.database.read() as session:
        tensor = session.connection().exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if tensor != "ok":
        raise StorageFailed(
            f"the catalog {path} is damaged: {tensor}",
            hint="`holdfast catalog rebuild`, or the daemon's next start, rebuilds it from the directories",
        )


def _unreleased_revision(path: Path) -> str | None:
    """The revision of a catalog that an unreleased version of holdfast made; None for any other file."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as file:
        (revision,) = file.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
        return str(revision) if is_unreleased(revision) else None
    return None


def _move_away(path: Path, why: str) -> Path:
    """Rename a file and its log, if any, to names without another log beside them."""
    aside = next(target for n in count(1) if not _has_parts(target := path.with_name(f"{path.name}.{why}-{n}")))
    set_aside(path.with_name(path.name + _INDEX), None)
    for suffix in _PARTS:
        source = path.with_name(path.name + suffix)
        if source.exists():
            set_aside(source, aside.with_name(aside.name + suffix))
    return aside


def _has_parts(path: Path) -> bool:
    return any(path.with_name(path.name + suffix).exists() for suffix in (*_PARTS, _INDEX))


def _readable(old: sqlite3.Connection, table: SqlTable) -> list[dict[str, Any]]:
    """Rows from both ends up to where each read fails."""
    rows_by_number: dict[int, dict[str, Any]] = {}
    for order in ("ASC", "DESC"):
        with suppress(sqlite3.Error):
            for row in _rows(old, table.name, order):
                number = row.pop("rowid")
                if number in rows_by_number:
                    break
                rows_by_number[number] = row
    return list(rows_by_number.values())


def _rows(old: sqlite3.Connection, table: str, order: str) -> Iterator[dict[str, Any]]:
    cursor = old.execute(f'SELECT rowid AS rowid, * FROM "{table}" ORDER BY rowid {order}')  # our own names
    names = [column[0] for column in cursor.description]
    for row in cursor:
        yield dict(zip(names, row, strict=True))


def _is_plausible(table: SqlTable, row: dict[str, Any]) -> bool:
    """Whether every value has its column's type; a flipped bit may leave a row that can be read and is wrong."""
    row.update(_NOT_BELIEVED.get(table.name, {}))
    return all(_fits(column, row.get(column.name)) for column in table.columns)


def _fits(column: Column[Any], value: Any) -> bool:
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, Boolean):
        return value in (0, 1)
    if isinstance(column.type, Integer):
        return isinstance(value, int) and -_NUMBERS_MAX < value < _NUMBERS_MAX
    if isinstance(column.type, Float):
        return isinstance(value, int | float)
    if isinstance(column.type, LargeBinary):
        return isinstance(value, bytes)
    if isinstance(column.type, JsonText):
        with suppress(ValueError, TypeError):
            json.loads(value)
            return True
        return False
    if not isinstance(value, str):
        return False
    names_a_run = column.name == "run" or column is RunRow.__table__.c.name
    return naming.is_run_name(value) if names_a_run else True


def _insert(new: sqlite3.Connection, table: SqlTable, row: dict[str, Any]) -> int:
    known = {column.name: row.get(column.name) for column in table.columns}
    if any(key.column.table.name == "runs" for key in table.foreign_keys):
        new.execute("INSERT OR IGNORE INTO runs (name, attempt) VALUES (?, 0)", (known["run"],))
    names = ", ".join(f'"{name}"' for name in known)
    marks = ", ".join("?" * len(known))
    cursor = new.execute(f'INSERT OR IGNORE INTO "{table.name}" ({names}) VALUES ({marks})', tuple(known.values()))
    return cursor.rowcount
