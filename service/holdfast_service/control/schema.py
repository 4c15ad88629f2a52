"""The catalog's tables, and the engine that reaches them. `migrations/` makes them; a test compares the two."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Boolean, Engine, ForeignKey, Index, Integer, String, Text, create_engine, event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

BUSY_TIMEOUT_S = 10
READ_ONLY = "holdfast_read_only"


class JsonText(TypeDecorator[Any]):
    """A JSON value as text, so that every database keeps it byte for byte."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)

    def process_result_value(self, value: str | None, dialect: Any) -> Any:
        return None if value is None else json.loads(value)


class Table(DeclarativeBase):
    type_annotation_map = {int: BigInteger}  # noqa: RUF012 — SQLAlchemy's own spelling


class RunRow(Table):
    """A run. `attempt` is the newest one declared, the number that fences off older writers (I6)."""

    __tablename__ = "runs"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    attempt: Mapped[int] = mapped_column(default=0)
    keep_last: Mapped[int | None]


class AttemptRow(Table):
    __tablename__ = "attempts"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    launch: Mapped[str] = mapped_column(String(256), primary_key=True)
    attempt: Mapped[int]
    world: Mapped[int]
    declared: Mapped[str] = mapped_column(String(40))


class AnswerRow(Table):
    """The step that every rank of an attempt restores as its `turn`-th; NULL says that there was none."""

    __tablename__ = "answers"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int | None]


class RoundRow(Table):
    __tablename__ = "rounds"
    __table_args__ = (Index("rounds_by_run", "run", "id"), Index("rounds_by_state", "state", "id"))

    # SQLite numbers rows by itself only where the key's type is spelt INTEGER.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    step: Mapped[int]
    attempt: Mapped[int]
    world: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    sealed: Mapped[int]
    opened: Mapped[str] = mapped_column(String(40))
    ended: Mapped[str | None] = mapped_column(String(40))
    code: Mapped[str | None] = mapped_column(String(64))
    detail: Mapped[str | None] = mapped_column(Text)


class CheckpointRow(Table):
    __tablename__ = "checkpoints"

    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    created: Mapped[str] = mapped_column(String(40))
    world: Mapped[int]
    groups: Mapped[list[str]] = mapped_column(JsonText)
    tensors: Mapped[int]
    files: Mapped[int]
    bytes: Mapped[int]
    metrics: Mapped[dict[str, float]] = mapped_column(JsonText)
    verified: Mapped[bool] = mapped_column(Boolean)


def connect(url: str) -> Engine:
    """An engine for `url`. On SQLite, what may write takes the write lock as it begins, so none can deadlock."""
    engine = create_engine(make_url(url))
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver would begin transactions at a moment of its own
    # Timeout first: switching to WAL needs the file to itself for a moment. With WAL, `synchronous = NORMAL` may lose the
    # last transactions in a power cut but never tears the file; the directories are the truth and are read at every start.
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
