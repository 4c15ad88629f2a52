"""What the catalog's tables are made of: their base class, and types of columns that every database keeps alike."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, DateTime, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator


def _ordered(length: int) -> String:
    """Text that is compared byte by byte, whatever the database's locale: cursors and times depend on it."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


NAME, TIME = _ordered(128), _ordered(40)
# SQLite numbers rows by itself only where the key's type is spelt INTEGER.
COUNTED = BigInteger().with_variant(Integer, "sqlite")
MOMENT = DateTime(timezone=True)  # of the database's own clock: no two nodes' clocks are ever compared (I17)


class FreeText(TypeDecorator[str]):
    """Text of any origin. What no database keeps, NUL and halves of surrogate pairs, is written out."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


class JsonText(TypeDecorator[Any]):
    """A JSON value as text of ASCII alone, so that every database keeps it byte for byte."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True)

    def process_result_value(self, value: str | None, dialect: Any) -> Any:
        return None if value is None else json.loads(value)


class Words(TypeDecorator[tuple[str, ...]]):
    """Words without spaces, as text with a space around each: that of one, ` word `, is part of it. NULL without any."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Any) -> str | None:
        return f" {' '.join(value)} " if value else None

    def process_result_value(self, value: str | None, dialect: Any) -> tuple[str, ...]:
        return tuple(value.split()) if value else ()


class CatalogTable(DeclarativeBase):
    type_annotation_map = {int: BigInteger}  # noqa: RUF012 — SQLAlchemy's own spelling
