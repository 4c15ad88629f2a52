"""The demo's output: the losses, the claims, the text, and where to look further."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .processes import DemoDaemon
from .proof import Claim, LaunchRecord

LOG_LINES = 25
TORCHRUN_REPORT = "torch/distributed/elastic/"  # stands in each line that torchrun logs about a failed rank
TEXT_COLUMNS = 80


def print_losses(
    console: Console,
    save_every: int,
    uninterrupted: Sequence[Sequence[LaunchRecord]],
    resumed: Sequence[Sequence[LaunchRecord]],
) -> None:
    """The mean loss of all ranks in both runs, at the first step, at every checkpoint and where the kill came."""
    whole = mean_losses([rank[-1] for rank in uninterrupted])
    before, after = (mean_losses([rank[launch] for rank in resumed]) for launch in (0, -1))
    notes = {max(before): "killed here", resumed[0][-1].restored: "resumed from here"}
    table = Table(title="Loss, mean of all ranks", title_justify="left", box=None, pad_edge=False)
    for title in ("step", "uninterrupted", "killed", "resumed"):
        table.add_column(title, justify="right")
    table.add_column()
    for step in sorted({1, *notes, *(step for step in whole if step % save_every == 0)}):
        losses = [f"{run[step]:.6f}" if step in run else "" for run in (whole, before, after)]
        table.add_row(str(step), *losses, notes.get(step, ""))
    console.print()
    console.print(Padding(table, (0, 0, 1, 3)))


def mean_losses(launches: Sequence[LaunchRecord]) -> dict[int, float]:
    """The mean over ranks of the losses at each step that all ranks finished."""
    steps = set.intersection(*(set(launch.losses) for launch in launches))
    return {step: fmean(launch.losses[step] for launch in launches) for step in sorted(steps)}


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    table = Table(title="What this shows, bit for bit, against the uninterrupted run", title_justify="left")
    table.add_column("")
    table.add_column("claim", no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for claim in claims:
        table.add_row("[green]✓[/green]" if claim.holds else "[red]✗[/red]", Text(claim.what), Text(claim.evidence))
    console.print(table)


def print_text(console: Console, text: str) -> None:
    """The generated text. Long lines are folded, as there are no words yet to break them at."""
    title = "what the last checkpoint writes (greedy)"
    panel = Panel(Text(text.rstrip(), overflow="fold"), title=title, title_align="left", width=TEXT_COLUMNS)
    console.print(panel)


def print_log(console: Console, log: Path | None) -> None:
    """Print the processes' own last lines, before torchrun's report of their end, and the log's path."""
    if log is None or not log.exists():
        return
    text = log.read_text(errors="replace")
    own = [line for line in text.partition(TORCHRUN_REPORT)[0].splitlines() if line.strip()]
    for line in (own or text.splitlines())[-LOG_LINES:]:
        console.print(f"   {line}", markup=False, style="dim", soft_wrap=True)
    console.print(f"Log: {log}", soft_wrap=True)


def print_farewell(console: Console, daemon: DemoDaemon) -> None:
    """Print how to look at the daemon with two runs."""
    console.print(
        f"The daemon is still running. See:  holdfast open --url {daemon.url}  or  holdfast ls --url {daemon.url}",
        soft_wrap=True,
    )
    console.print(f"Stop it:  kill {daemon.process.pid}   (it exits after 15 minutes without visitors)", soft_wrap=True)
