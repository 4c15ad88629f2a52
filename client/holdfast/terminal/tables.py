"""Tables of commands: as wide as the terminal, or in a pipe one line a row with tabs between whole values.

Too wide ones shrink in this order: prose is wrapped between words; columns are left out, in the order that the command
states, and a line names them; long names lose their middle. Words are not broken, numbers never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast_formats.printable import visible

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2  # spaces between columns
NAME_MIN = 28  # cells that a name keeps as long as there are columns to leave out
WORD_MIN = 24  # the longest word for which a column of prose makes room
LAST_MIN = 6  # cells to which a name is cut if nothing else is left
CUT = "…"


class Styled(NamedTuple):
    """The text of a cell, or a line of it."""

    text: str
    style: Any = ""

    def __str__(self) -> str:
        return self.text


class Table:
    """Rows of cells, which are strings or styled texts."""

    def __init__(
        self, columns: Sequence[str], right: Sequence[str] = (), drop: Sequence[str] = (), wrap: Sequence[str] = ()
    ) -> None:
        """`right`: columns of numbers. `drop`: columns in the order of omission. `wrap`: columns of prose."""
        self.columns, self._right, self._drop, self._wrap = tuple(columns), set(right), tuple(drop), set(wrap)
        unknown = {*right, *drop, *wrap} - {*columns}
        if unknown:
            raise ValueError(f"no such columns: {unknown}")
        self.rows: list[tuple[str | Text | Styled, ...]] = []

    def add_row(self, *cells: str | Text | Styled) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def plain(self) -> str:
        """For a pipe: a header, then a line for each row; tabs separate the uncut cells."""
        lines = [self.columns, *([visible(str(cell)) for cell in row] for row in self.rows)]
        return "".join("\t".join(line) + "\n" for line in lines)

    def __rich_console__(self, _console: Any, options: Any) -> Iterator[Text]:
        yield from _Fitted(self, options.max_width).lines()

    def columns_at(self, width: int) -> tuple[list[int], list[str]]:
        """Numbers of the columns shown at this width, and names of the omitted ones."""
        fitted = _Fitted(self, width)
        return fitted.shown, fitted.dropped

    def least(self, number: int, natural: int, longest_word: int) -> int:
        """How narrow a column may become before another one is left out."""
        name = self.columns[number]
        if name in self._right:
            return natural
        if name in self._wrap:
            return min(natural, max(min(longest_word, WORD_MIN), len(name)))
        return min(natural, max(NAME_MIN, len(name)))

    def is_right(self, number: int) -> bool:
        return self.columns[number] in self._right

    def wraps(self, number: int) -> bool:
        return self.columns[number] in self._wrap

    @property
    def drop_order(self) -> list[int]:
        return [self.columns.index(name) for name in self._drop]


class _Fitted:
    """A table at one width of a terminal."""

    def __init__(self, table: Table, width: int) -> None:
        from rich.text import Text

        self._table, self._text = table, Text
        self._rows = [[_cell(cell) for cell in row] for row in table.rows]
        self.natural = [
            max([_cells(name), *(_cells(row[number][0]) for row in self._rows)]) for number, name in enumerate(table.columns)
        ]
        self.shown = list(range(len(table.columns)))
        self.dropped: list[str] = []
        least = [table.least(number, self.natural[number], self._longest_word(number)) for number in self.shown]
        for number in table.drop_order:
            if self._total(least) <= width:
                break
            self.shown.remove(number)
            self.dropped.append(table.columns[number])
        self.widths = self._spread(least, width)

    def lines(self) -> Iterator[Text]:
        yield self._line([Styled(name, "bold") for name in self._table.columns])
        for row in self._rows:
            parts = [self._parts(number, row[number]) for number in range(len(row))]
            for level in range(max([len(parts[number]) for number in self.shown], default=0)):
                yield self._line([part[level] if level < len(part) else Styled("") for part in parts])
        if self.dropped:
            text = f"left out: {', '.join(self.dropped)} (a wider terminal, a pipe and --json have them)"
            yield self._text(text, "dim")

    def _line(self, cells: Sequence[Styled]) -> Text:
        line = self._text(no_wrap=True, end="\n")
        for place, number in enumerate(self.shown):
            text, style = cells[number]
            room = " " * max(self.widths[number] - _cells(text), 0)
            gap = " " * GAP if place else ""
            line.append(gap + room if self._table.is_right(number) else gap)
            line.append(text, style)
            if not self._table.is_right(number) and place < len(self.shown) - 1:
                line.append(room)
        return line

    def _parts(self, number: int, cell: Styled) -> list[Styled]:
        width = self.widths[number]
        if not self._table.wraps(number):
            return [Styled(shortened(cell.text, width), cell.style)]
        return [Styled(line, cell.style) for line in wrapped(cell.text, width)]

    def _longest_word(self, number: int) -> int:
        return max([_cells(word) for row in self._rows for word in row[number][0].split(" ")], default=0)

    def _total(self, widths: Sequence[int]) -> int:
        return sum(widths[number] for number in self.shown) + GAP * max(len(self.shown) - 1, 0)

    def _spread(self, least: list[int], width: int) -> list[int]:
        """Give the rest to the narrowest that need more; take what is lacking from the widest names."""
        widths = list(least)
        spare = width - self._total(widths)
        while spare > 0 and (needy := [number for number in self.shown if widths[number] < self.natural[number]]):
            widths[min(needy, key=lambda one: widths[one])] += 1
            spare -= 1
        names = [number for number in self.shown if not self._table.is_right(number)]
        while spare < 0 and names:
            widest = max(names, key=lambda one: widths[one])
            if widths[widest] <= LAST_MIN:
                break
            widths[widest] -= 1
            spare += 1
        return widths


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken between words; a longer word loses its middle."""
    lines: list[str] = []
    for word in text.split(" "):
        fits = lines and _cells(lines[-1]) + 1 + _cells(word) <= width
        if fits:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, width))
    return lines


def shortened(text: str, width: int) -> str:
    """At most `width` cells: beginning, …, end. Wide characters and combining ones stay whole."""
    if _cells(text) <= width:
        return text
    from rich.cells import split_graphemes

    spans, _ = split_graphemes(text)
    head_max = width // 2
    head = tail = 0
    begin, end = 0, len(text)
    for _, after, cells in spans:
        if head + cells > head_max:
            break
        head, begin = head + cells, after
    for before, _, cells in reversed(spans):
        if head + 1 + tail + cells > width or before < begin:
            break
        tail, end = tail + cells, before
    return text[:begin] + CUT + text[end:]


def _cell(cell: str | Text | Styled) -> Styled:
    """Text and style of a cell on one line; several styles become that of its beginning."""
    if isinstance(cell, (str, Styled)):
        return Styled(visible(str(cell)), cell.style if isinstance(cell, Styled) else "")
    return Styled(visible(cell.plain), cell.style)


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
