"""Restrict queries to the runs that a request may see: set once per request, applied to every reading query.

A pattern is a run's name, a prefix ending in `*`, or `*` for all; or several of these, separated by commas. Stores need no
code for it, so none can forget it, and pages are full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import ColumnElement, event, func, or_, true
from sqlalchemy.orm import InstrumentedAttribute, ORMExecuteState, Session, with_loader_criteria

from holdfast_formats.rest.access import ALL, AND, matches
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.schema import RunRow

_pattern: ContextVar[str] = ContextVar("holdfast_visible_runs", default=ALL)


def joined(patterns: Iterable[str]) -> str:
    """One pattern for all runs of these."""
    parts = sorted({part for one in patterns for part in one.split(AND)})
    return ALL if ALL in parts else AND.join(parts)


def visible(run: str) -> bool:
    """Whether the present request may see a run: for data from outside the catalog."""
    return matches(_pattern.get(), run)


def sees_all() -> bool:
    """Whether the present request may see data about no run, or about all of them together."""
    return _pattern.get() == ALL


def covers(pattern: str, other: str) -> bool:
    """Whether every run of the other pattern is one of this one's."""
    return all(any(_inside(part, one) for one in pattern.split(AND)) for part in other.split(AND))


def _inside(part: str, one: str) -> bool:
    return part == one or (one.endswith(ALL) and part.removesuffix(ALL).startswith(one[:-1]))


@contextmanager
def limited_to(pattern: str) -> Iterator[None]:
    """Restrict the block, and its calls in other threads through the event loop, to the pattern's runs."""
    before = _pattern.set(pattern)
    try:
        yield
    finally:
        _pattern.reset(before)


def restrict(session: Session) -> None:
    """Restrict this session to the visible runs. Rows of no run are visible only with all runs."""
    pattern = _pattern.get()
    if pattern == ALL:
        return

    def limited(state: ORMExecuteState) -> None:
        for table, column in _RUNS:
            state.statement = state.statement.options(with_loader_criteria(table, criterion(column, pattern)))

    event.listen(session, "do_orm_execute", limited)


def criterion(column: InstrumentedAttribute[str], pattern: str) -> ColumnElement[bool]:
    """That a column names one of the pattern's runs."""
    return or_(*(_one(column, part) for part in pattern.split(AND)))


def _one(column: InstrumentedAttribute[str], pattern: str) -> ColumnElement[bool]:
    if pattern == ALL:
        return true()
    if not pattern.endswith(ALL):
        return column == pattern
    prefix = pattern[:-1]
    return func.substr(column, 1, len(prefix)) == prefix  # LIKE ignores case on SQLite, and comparing follows the collation


def _columns() -> list[tuple[type[CatalogTable], Any]]:
    others = [(table, table.run) for table in CatalogTable.__subclasses__() if hasattr(table, "run")]
    return [(RunRow, RunRow.name), *others]


_RUNS = _columns()
