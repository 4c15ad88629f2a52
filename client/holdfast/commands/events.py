"""`holdfast events`: past events, and with --follow those that happen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.rest import filters
from holdfast.terminal import completion, console
from holdfast.terminal.options import Since, Url
from holdfast_formats import timestamps
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.printable import visible_json

if TYPE_CHECKING:
    from holdfast.rest.api import Api
    from holdfast_formats.rest.operations import Event, Gap

LAST = 50  # events that are shown without --since, --after and --last
_COLOURS = {"info": "green", "warning": "yellow", "error": "bold red"}
_PATH = "/v1/events"
Run = Annotated[str | None, typer.Argument(metavar="RUN", help="Only events of this run.", autocompletion=completion.runs)]
Kind = Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only events of this kind.")]
After = Annotated[
    int | None, typer.Option("--after", metavar="ID", help="Only events after this ID; 0: all that are stored.", min=0)
]
Last = Annotated[
    int | None,
    typer.Option("--last", "-n", metavar="N", help=f"Only the newest N. Without --since and --after: {LAST}.", min=0),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Then show events as they happen, until interrupted.")]
Count = Annotated[int | None, typer.Option("--count", metavar="N", help="With --follow: exit after N events.", min=1)]
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


def events(  # noqa: PLR0913 - options of a command
    run: Run = None,
    kind: Kind = None,
    since: Since = None,
    after: After = None,
    last: Last = None,
    follow: Follow = False,
    count: Count = None,
    url: Url = None,
    as_json: Lines = False,
) -> None:
    """Show the events of all runs, or of one, oldest first. With --follow, a lost connection is made again, and no event is
    missed.
    """
    from holdfast_formats.rest.operations import EVENTS, Event

    with console.service(url, as_json) as api, suppress(KeyboardInterrupt):
        if kind is not None and kind not in EVENTS:
            raise InvalidRequest(f"{kind!r} is not a kind of event", hint=f"one of {', '.join(EVENTS)}")
        if count is not None and not follow:
            raise InvalidRequest("--count needs --follow", hint="--last N shows the newest N")
        start = filters.since(since)
        if follow and after is not None and last is None and start is None:
            found: Iterator[Event] = iter(())  # the stream has the past ones too, and says what is not stored any more
            position = after
        else:
            position = max((event.id for event in islice(api.pages(_PATH, Event, {"limit": "1"}), 1)), default=0)
            query = {"run": run, "kind": kind, "after": None if after is None else str(after)}
            found = _past(api, query, start, last, position)
        if follow:
            found = _joined(found, api.events(position, run, kind, on_gap=_say_line if as_json else _say_gap))
        for event in islice(found, count):
            _line(event.model_dump()) if as_json else _print(event)


def _past(api: Api, query: dict[str, str | None], start: str | None, last: int | None, position: int) -> Iterator[Event]:
    """Stored events up to an ID, oldest first."""
    from holdfast.rest.api import PAGE_ITEMS
    from holdfast_formats.rest.operations import Event

    if last is None and start is None and query["after"] is None:
        last = LAST
    limit = str(PAGE_ITEMS if last is None else min(max(last, 1), PAGE_ITEMS))
    newest_first = (event for event in api.pages(_PATH, Event, {**query, "limit": limit}) if event.id <= position)
    begin = None if start is None else timestamps.read(start)
    recent = takewhile(lambda event: begin is None or timestamps.read(event.at) >= begin, newest_first)
    return reversed(list(islice(recent, last)))


def _joined(past: Iterator[Event], coming: Iterator[Event]) -> Iterator[Event]:
    yield from past
    yield from coming


def _print(event: Event) -> None:
    from rich.text import Text

    where = "" if event.run is None else event.run if event.step is None else f"{event.run}@{event.step}"
    kind = (f"{event.kind:<22}", _COLOURS[event.level])
    time = event.at[:19].replace("T", " ")
    console.out().print(Text.assemble((f"{time} ", "dim"), kind, " ", (f"{where:<20}", "bold"), " ", event.text))


def _say_gap(gap: Gap) -> None:
    text = f"events after {gap.asked} are no longer stored; continuing with {gap.oldest}"
    console.err().print(text, style="yellow", markup=False)


def _say_line(gap: Gap) -> None:
    _line({"gap": gap.model_dump()})


def _line(value: dict[str, Any]) -> None:
    print(visible_json(json.dumps(value, ensure_ascii=False)), flush=True)
