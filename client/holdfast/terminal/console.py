"""Terminal output of commands: tables and progress for people, JSON for programs, errors for both."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import typer

from holdfast.rest.waiting_notice import silence_reported
from holdfast.terminal.tables import Styled, Table
from holdfast_formats import timestamps
from holdfast_formats.errors import CheckpointError, InvalidRequest, exit_status
from holdfast_formats.printable import visible_json, visible_lines
from holdfast_formats.rest.columns import CellPart, Listing, Row
from holdfast_formats.rest.columns import human_bytes as human_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from holdfast.rest.api import Api

PROGRESS_AFTER_S = 5.0
_STEPS = ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h"), (float("inf"), 86_400, "d"))


def out() -> Console:
    """The console for results; created for each use, so that it follows a redirected stdout."""
    from holdfast.terminal.rich_console import SafeConsole

    return SafeConsole(highlight=False, soft_wrap=not sys.stdout.isatty())


def err() -> Console:
    from holdfast.terminal.rich_console import SafeConsole

    return SafeConsole(stderr=True, highlight=False, soft_wrap=True)


def show(result: Table | str) -> None:
    """Print a table, or a sentence. Into a pipe it is written without rich, whose import takes a while."""
    if sys.stdout.isatty():
        out().print(result)
    else:
        sys.stdout.write(result.plain() if isinstance(result, Table) else f"{visible_lines(result)}\n")


def listed(listing: Listing[Row], rows: Sequence[Row], nothing: str, as_json: bool) -> None:
    """Print a list as JSON or as a table; if it is empty, `nothing`."""
    if as_json:
        print_json(rows)
    else:
        show(table_of(listing, rows) if rows else nothing)


def table_of(listing: Listing[Row], rows: Sequence[Row]) -> Table:
    columns = {column.heading.upper(): column for column in listing.shown("command")}
    drop = sorted((name for name, column in columns.items() if column.omit), key=lambda name: columns[name].omit)
    right = [name for name, column in columns.items() if column.right]
    filled = Table(tuple(columns), right, drop, [name for name, column in columns.items() if column.wraps])
    for row in rows:
        filled.add_row(*(_styled(column.parts(row)) for column in columns.values()))
    return filled


def _styled(parts: Sequence[CellPart]) -> Styled:
    """A cell in the style of its first part."""
    texts = ["-" if part.value is None else _TEXTS.get(part.form, str)(part.value) for part in parts if part.form != "more"]
    return Styled(" ".join(texts), STYLES.get(parts[0].value if parts[0].form == "state" else parts[0].form, ""))


@contextmanager
def service(url: str | None, as_json: bool) -> Iterator[Api]:
    """The service at this URL, or at the default one; errors are reported."""
    from holdfast.config import default_url
    from holdfast.rest.api import Api

    with reporting(as_json), Api(url or default_url()) as api:
        yield api


def answer(value: Any, text: str | Text | Callable[[], None], as_json: bool) -> None:
    """Print the result of a command: `value` as JSON, or what people read, unless `text` prints it."""
    if as_json:
        print_json(value)
    elif callable(text):
        text()
    else:
        out().print(text, markup=False)


def confirm(question: str, undone: str, as_json: bool) -> None:
    """Ask on the terminal; `InvalidRequest` with what was not done if the output is JSON, or if nothing answers."""
    if as_json:
        raise InvalidRequest(f"{undone}: --json does not ask", hint="add -y (--yes)")
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise InvalidRequest(f"{undone}: no terminal to ask for confirmation", hint="add -y (--yes)") from None
    if not agreed:
        raise typer.Abort


def print_json(value: Any) -> None:
    """`value` may contain models of the REST API."""
    print(visible_json(json.dumps(value, indent=2, ensure_ascii=False, default=lambda model: model.model_dump())))


@contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn an error into a message on stderr (or a problem on stdout) and an exit status; report a silent service on
    stderr.
    """
    try:
        with silence_reported(lambda text: err().print(text, markup=False)):
            yield
    except CheckpointError as error:
        if as_json:
            print_json(error.problem())
        else:
            from rich.text import Text

            console = err()
            console.print(Text.assemble((f"{error.code}: ", "bold red"), error.detail))
            if error.hint:
                console.print(Text.assemble(("hint: ", "bold"), error.hint))
        raise typer.Exit(exit_status(error)) from error


def warn(text: str) -> None:
    """Print a warning on stderr."""
    err().print(text, style="yellow", markup=False)


def table(*columns: str, right: Sequence[str] = (), drop: Sequence[str] = (), wrap: Sequence[str] = ()) -> Table:
    """A plain table: `right` are columns of numbers, `wrap` of prose, `drop` those that a narrow terminal omits, in
    order.
    """
    return Table(columns, right, drop, wrap)


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Progress]:
    """A progress bar in bytes on stderr, for what takes longer than 5 s, removed when done; its only task is number 0.
    Hidden unless stderr is a terminal.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = err()
    bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
    bar.add_task(visible_lines(what), total=total)
    beginning = threading.Timer(PROGRESS_AFTER_S, bar.start)
    if not bar.disable:
        beginning.start()
    try:
        yield bar
    finally:
        beginning.cancel()
        if not bar.disable:
            beginning.join()
        if bar.live.is_started:
            bar.stop()


@contextmanager
def told(what: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, updated by a callback with the bytes done and in total."""
    with progress(what, 0, shown) as bar:
        yield lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total)


def human_age(created: str, now: datetime | None = None) -> str:
    """How long ago an RFC 3339 time was, or in how long it comes; the text itself if it cannot be parsed."""
    try:
        then = timestamps.read(created)
    except ValueError:
        return created
    passed = ((now or datetime.now(timezone.utc)) - then).total_seconds()
    _, unit_s, unit = next(step for step in _STEPS if abs(passed) < step[0])
    span = f"{abs(passed) / unit_s:.0f} {unit}"
    return f"{span} ago" if passed >= 0 else f"in {span}"


def human_seconds(seconds: float | None) -> str:
    """0.0123 -> 12 ms, 75 -> 75 s, 7500 -> 125 min; - for unknown."""
    if not seconds:
        return "-" if seconds is None else "0 s"
    for below, unit_s, unit in ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < below:
            value = seconds / unit_s
            return f"{value:.1f} {unit}" if value < 10 and unit in ("ms", "s") else f"{value:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def progress_text(done: int, total: int) -> str:
    if not total or done >= total:
        return human_bytes(total) if total else "-"
    return f"{done / total:.0%} of {human_bytes(total)}"


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "number": lambda number: f"{number:.4g}" if isinstance(number, float) else str(number),
    "bytes": human_bytes,
    "share": lambda share: f"{share:.1%}",
    "duration": human_seconds,
    "age": human_age,
    "moment": lambda at: at[:19],
    "meter": lambda part: f"{part[0] / part[1]:.0%}",
    "progress": lambda part: progress_text(*part[:2]),
}
STYLES: Mapping[str, str] = {
    "error": "bold red",
    "warning": "yellow",
    "quiet": "dim",
    "done": "green",
    "failed": "bold red",
    "cancelled": "yellow",
    "running": "cyan",
    "queued": "dim",  # jobs
    "live": "green",
    "returned": "yellow",
    "stopped": "dim",
    "lost": "bold red",  # nodes
    "keep": "green",
    "thin": "yellow",
    "compact": "yellow",
    "remove": "red",  # verdicts
}
