"""`holdfast watch`: show events as they happen."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.terminal import completion, console
from holdfast.terminal.options import Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.printable import visible_json
from holdfast_formats.rest.operations import EVENTS, Event, Gap

_COLOURS = {"info": "green", "warning": "yellow", "error": "bold red"}
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


def watch(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Only events of this run.", autocompletion=completion.runs)
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only events of this kind.")] = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after", metavar="ID", help="Start after this event ID; 0 starts with the oldest stored event.", min=0
        ),
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", metavar="N", help="Exit after N events.", min=1)] = None,
    url: Url = None,
    as_json: Lines = False,
) -> None:
    """Show events as they happen, until interrupted. A lost connection is made again, and no event is missed."""
    with console.service(url, as_json) as api, suppress(KeyboardInterrupt):
        if kind is not None and kind not in EVENTS:
            raise InvalidRequest(f"{kind!r} is not a kind of event", hint=f"one of {', '.join(EVENTS)}")
        for shown, event in enumerate(api.events(after, run, kind, on_gap=_say_line if as_json else _say_gap), 1):
            if as_json:
                _line(event.model_dump())
            else:
                _print(event)
            if shown == count:
                return


def _print(event: Event) -> None:
    where = "" if event.run is None else event.run if event.step is None else f"{event.run}@{event.step}"
    time = event.at[11:19] if len(event.at) >= 19 else event.at
    kind = (f"{event.kind:<22}", _COLOURS[event.level])
    console.out().print(Text.assemble((f"{time} ", "dim"), kind, " ", (f"{where:<20}", "bold"), " ", event.text))


def _say_gap(gap: Gap) -> None:
    text = f"events after {gap.asked} are no longer stored; continuing with {gap.oldest}"
    console.err().print(text, style="yellow", markup=False)


def _say_line(gap: Gap) -> None:
    _line({"gap": gap.model_dump()})


def _line(value: dict[str, Any]) -> None:
    print(visible_json(json.dumps(value, ensure_ascii=False)), flush=True)
