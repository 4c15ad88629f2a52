"""`holdfast top`: live overview of how the checkpointing of all runs goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from holdfast.rest.summaries import summaries
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast.terminal.tables import Table
from holdfast_formats.errors import Unavailable
from holdfast_formats.printable import visible
from holdfast_formats.rest.measurements import RunSummary
from holdfast_formats.timestamps import check_seconds

RUNS_SHOWN = 40
ADVICE_SHOWN = 8
_TIMES = ("COMMIT", "EXPOSED", "STALL p50", "STALL p95", "DURABLE p95")
_COLUMNS = ("RUN", "STATE", "STEP", *_TIMES, "DISK", "LOST", "EVERY", "BETTER", "ATTENTION")
_DROPPED = ("DURABLE p95", "DISK", "STALL p50", "BETTER", "EVERY", "LOST", "STALL p95", "COMMIT")  # in this order

Prefix = Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only runs whose name starts with this.")]
Once = Annotated[bool, typer.Option("--once", help="Print once and exit; this is the default if stdout is not a terminal.")]
Every = Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.2, help="Seconds between updates.")]
Most = Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Show at most N runs.")]
ByName = Annotated[bool, typer.Option("--by-name", help="Sort by name instead of by need for attention.")]


def top(  # noqa: PLR0913 — one option each
    prefix: Prefix = "",
    once: Once = False,
    every: Every = 2.0,
    runs: Most = RUNS_SHOWN,
    by_name: ByName = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show how all runs are checkpointed. Runs that need attention come first."""
    with console.service(url, as_json) as api:
        check_seconds(every, "--every")

        def look() -> list[RunSummary]:
            return list(summaries(api, prefix, "name" if by_name else "attention", runs, failed=bool(prefix)))

        if as_json:
            console.print_json([summary.model_dump() for summary in look()])
            return
        screen = console.out()
        if once or not screen.is_terminal:
            for part in render(look()):
                screen.print(part)
            return
        with Live(Group(*render(look())), console=screen, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(every)
                    live.update(Group(*_looked(look)), refresh=True)
            except KeyboardInterrupt:
                return


def _looked(look: Callable[[], list[RunSummary]]) -> list[Table | Text]:
    try:
        return render(look())
    except Unavailable as error:  # it may come back
        return [Text(f"{error.code}: {visible(error.detail)}", style="bold red")]


def render(shown: list[RunSummary]) -> list[Table | Text]:
    """The table, and below it the problems with their hints."""
    if not shown:
        return [Text("No runs.")]
    table = console.table(*_COLUMNS, right=_COLUMNS[2:-1], drop=_DROPPED, wrap=_COLUMNS[-1:])
    for summary in shown:
        table.add_row(Text(summary.run), *_cells(summary), _flag(summary))
    advice = [(summary.run, item) for summary in shown for item in summary.attention if item.acknowledged is None]
    lines = [
        Text.assemble(
            ("✖ " if item.level == "error" else "! ", "bold red" if item.level == "error" else "yellow"),
            (f"{run}: ", "bold"),
            visible(item.text),
            (f" → {visible(item.hint)}", "dim"),
        )
        for run, item in advice[:ADVICE_SHOWN]
    ]
    if len(advice) > ADVICE_SHOWN:
        lines.append(Text(f"  and {len(advice) - ADVICE_SHOWN} more", style="dim"))
    return [table, *([Text(""), *lines] if lines else [])]


def _cells(summary: RunSummary) -> list[str]:
    lost = "-" if summary.goodput_lost is None else f"{summary.goodput_lost:.2%}"
    return [
        summary.standing or summary.life,
        "-" if summary.newest is None else str(summary.newest),
        console.human_seconds(summary.last_commit_age_s),
        console.human_seconds(summary.exposed_s),
        console.human_seconds(summary.stall_p50_s),
        console.human_seconds(summary.stall_p95_s),
        console.human_seconds(summary.durable_p95_s),
        "not measured" if summary.disk_ratio is None else f"{summary.disk_ratio:.0%}",
        lost,
        console.human_seconds(summary.interval_s),
        console.human_seconds(summary.recommended_interval_s),
    ]


def _flag(summary: RunSummary) -> Text:
    counted = [item for item in summary.attention if item.acknowledged is None]
    style = "bold red" if any(item.level == "error" for item in counted) else "yellow"
    return Text(" ".join(item.code for item in counted), style=style)
