"""`holdfast ls`: runs, or the checkpoints of one."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from holdfast import console
from holdfast.library import Library, open_library
from holdfast_formats import rest
from holdfast_formats.errors import CheckpointError

from .options import AsJson, Root, Url


def ls(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="List this run's checkpoints.")] = None,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List runs, or the checkpoints of one run, newest first."""
    with console.reporting(as_json), closing(open_library(root, url)) as library:
        if run is None:
            _list_runs(library, as_json)
        else:
            _list_checkpoints(library, run, as_json)


def _list_runs(library: Library, as_json: bool) -> None:
    runs = library.runs()
    if as_json:
        console.print_json([run.model_dump() for run in runs])
        return
    table = console.table("RUN", "NEWEST", "CHECKPOINTS", "BYTES", right=("NEWEST", "CHECKPOINTS", "BYTES"))
    for run in runs:
        newest = "-" if run.newest is None else str(run.newest)
        table.add_row(run.name, newest, str(run.checkpoints), console.human_bytes(run.bytes))
    console.out().print(table if runs else f"No runs in {library.label}.", markup=False)


def _list_checkpoints(library: Library, run: str, as_json: bool) -> None:
    listing = library.checkpoints(run)
    if as_json:
        console.print_json([checkpoint.model_dump() for checkpoint in listing.checkpoints])
    else:
        shown = _table(listing.checkpoints) if listing.checkpoints else f"No checkpoints of {run} in {library.label}."
        console.out().print(shown, markup=False)
    for error in listing.unreadable:
        _warn(error)


def _table(checkpoints: list[rest.Checkpoint]) -> object:
    table = console.table("STEP", "CREATED", "BYTES", "TENSORS", "GROUPS", "METRICS", right=("STEP", "BYTES", "TENSORS"))
    for made in checkpoints:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in made.metrics.items())
        size = console.human_bytes(made.bytes)
        table.add_row(
            str(made.step), console.human_age(made.created), size, str(made.tensors), " ".join(made.groups), metrics
        )
    return table


def _warn(error: CheckpointError) -> None:
    console.err().print(f"unreadable: {error.detail}", style="yellow", markup=False)
