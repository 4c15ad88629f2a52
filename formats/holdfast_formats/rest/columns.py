"""Lists as columns: a list is described once, for a command's table, a page's table and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from holdfast_formats.printable import spreadsheet_cell

Row = TypeVar("Row")
RUN_SORTS = ("name", "state", "age", "exposed", "stall", "goodput", "storage", "checkpoints", "newest")  # lists of runs
# A moment is an exact time; progress is bytes that are done, and all, with a state; a meter is two numbers of bytes; more
# is pairs of a name and a text, on a page only.
Words = Literal["text", "quiet", "code", "error", "warning", "state", "more"]
Form = Words | Literal["step", "number", "bytes", "share", "duration", "age", "moment", "progress", "meter"]
_RIGHT = ("step", "number", "bytes", "share", "progress", "meter")


class CellPart(NamedTuple):
    """A piece of a cell. Each program says how a form looks; None is unknown."""

    value: Any
    form: Form = "text"
    link: str | None = None  # path of a page
    title: str = ""  # a longer text on a page; of "more", what it is opened with


def quiet(text: str) -> CellPart:
    return CellPart(text, "quiet")


def bad(text: str) -> CellPart:
    return CellPart(text, "error")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column. `cell` is the name of an attribute (or key), or returns a value, a `CellPart`, or several of them."""

    heading: str
    cell: str | Callable[[Row], Any]
    form: Form = "text"
    wraps: bool = False  # prose
    omit: int = 0  # a narrow terminal leaves out the columns with 1, 2 … in this order
    only: Literal["", "page", "command"] = ""

    @property
    def right(self) -> bool:
        return self.form in _RIGHT

    def parts(self, row: Row) -> list[CellPart]:
        if callable(self.cell):
            cell = self.cell(row)
        else:
            cell = row[self.cell] if isinstance(row, Mapping) else getattr(row, self.cell)
        pieces = (
            cell
            if isinstance(cell, (tuple, list)) and self.form != "progress" and not isinstance(cell, CellPart)
            else [cell]
        )
        parts = [one if isinstance(one, CellPart) else CellPart(one, self.form) for one in pieces if one not in (None, "")]
        return parts or [CellPart(None)]


@dataclass(frozen=True)
class Listing(Generic[Row]):
    """A list: its columns, its place in the API, and for CSV the fields of its bodies."""

    columns: tuple[Column[Row], ...] = ()
    path: str = ""  # below the run, or the checkpoint, if it is one's
    fields: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()  # parameters that the API takes
    filled: Callable[[dict[str, Any]], Mapping[str, Any]] = dict  # adds fields that follow from others
    marked: Callable[[Row], bool] = lambda row: False  # as one that needs attention, on a page

    def shown(self, where: Literal["page", "command"]) -> tuple[Column[Row], ...]:
        return tuple(column for column in self.columns if column.only in ("", where))

    def csv(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """A header and the rows, without spreadsheet formulas and terminal control characters."""
        written = io.StringIO()
        writer = csv.writer(written)
        writer.writerow(self.fields)
        writer.writerows([_cell(row.get(name)) for name in self.fields] for row in rows)
        return written.getvalue()


def checkpoint(run: str, step: int | None = None, text: str | None = None) -> CellPart:
    """RUN or RUN@STEP, or another text, with a link to its page."""
    at = "" if step is None else f"@{step}"
    page = f"/runs/{quote(run, safe='')}" + ("" if step is None else f"/checkpoints/{step}")
    return CellPart(f"{run}{at}" if text is None else text, "text", page)


def human_bytes(size: float) -> str:
    """1234567 -> 1.2 MB, in decimal units as Hugging Face counts."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"


def count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, list) and all(isinstance(one, (str, int)) for one in value):
        value = " ".join(map(str, value))
    elif isinstance(value, dict) and all(not isinstance(one, (list, dict)) for one in value.values()):
        value = " ".join(f"{name}={one}" for name, one in value.items())
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return spreadsheet_cell(value)
