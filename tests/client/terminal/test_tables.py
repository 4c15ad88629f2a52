"""Tables: nothing is wider than the terminal, no word is broken, nothing is lost in a pipe, nothing steers the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from holdfast.terminal.rich_console import SafeConsole
from holdfast.terminal.tables import CUT, Table, shortened, wrapped
from holdfast_formats.printable import visible

TEXTS = st.text(st.sampled_from("ab-./ é漢字\u0301\u200d👩\x1b\n\t\u202e\x9b\x00"), max_size=60)


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, force_terminal=True, no_color=True, highlight=False, color_system=None)
    with console.capture() as caught:
        console.print(table)
    return caught.get().splitlines()


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS, st.integers(0, 10**12)), max_size=6), st.integers(40, 130))
def test_width(rows: list[tuple[str, str, str, int]], width: int) -> None:
    """Whatever the cells hold, no line is wider than the terminal, and each row has its line at least."""
    table = Table(("NAME", "KIND", "WHY", "BYTES"), ("BYTES",), ("KIND",), ("WHY",))
    for *cells, number in rows:
        table.add_row(*cells, str(number))
    lines = printed(table, width)
    assert all(cell_len(line) <= width for line in lines)
    assert not any("\x1b" in line.replace("\x1b[", "") or "\u202e" in line for line in lines)
    assert len(lines) >= 1 + len(rows)
    assert [line.rstrip("\n").split("\t") for line in table.plain().splitlines()[1:]] == [
        [*map(visible, cells), str(number)] for *cells, number in rows
    ]


@given(TEXTS, st.integers(2, 40))
def test_shortened(text: str, width: int) -> None:
    """A name that is cut keeps its beginning and its end, and no cluster of characters is torn apart."""
    shown = visible(text)
    short = shortened(shown, width)
    assert cell_len(short) <= width
    if short != shown:
        begin, end = short.split(CUT)
        assert shown.startswith(begin) and shown.endswith(end)
        assert not end.startswith("\u0301")


@given(st.lists(st.text(st.sampled_from("abc漢"), min_size=1, max_size=12), min_size=1), st.integers(24, 60))
def test_wrapped(words: list[str], width: int) -> None:
    """Prose is broken between words only."""
    lines = wrapped(" ".join(words), width)
    assert " ".join(lines) == " ".join(words)
    assert all(cell_len(line) <= width for line in lines)


def test_columns_are_left_out_in_order() -> None:
    """Those that a table names, one after the other, and a line says which; numbers are never cut."""
    table = Table(("NAME", "A", "B", "C"), right=("A", "B", "C"), drop=("B", "A"))
    table.add_row("n" * 60, "1" * 12, "2" * 12, "3" * 12)
    assert table.columns_at(200) == ([0, 1, 2, 3], [])
    assert table.columns_at(60) == ([0, 1, 3], ["B"])
    assert table.columns_at(45) == ([0, 3], ["B", "A"])
    assert any(line.startswith("left out: B, A") for line in printed(table, 45))
    assert "3" * 12 in printed(table, 45)[1]
    assert "left out" not in table.plain() and "n" * 60 in table.plain()


def test_a_pipe_gets_no_escape() -> None:
    """The console of commands writes what others have said so that no terminal obeys it, styled or not."""
    console = SafeConsole(width=80, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as caught:
        console.print("[red]a\x1b[2Jb[/red] :smile:")
        console.print(Text.assemble(("x\x1b]0;title\x07", "bold"), "\u202ey"))
    shown = caught.get()
    assert "[red]a\\x1b[2Jb[/red] :smile:" in shown
    assert "\x1b]0;" not in shown and "\x07" not in shown and "\u202e" not in shown
    assert "\x1b[1mx\\x1b]0;title\x1b[0m\\u202ey" in shown  # rich drops the bell itself
