"""`holdfast stats`: statistics of a checkpoint's tensors."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Literal

import typer

from holdfast.config import default_url
from holdfast.read.checkpoint_index import parse_target, step_of
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import SELECTED, AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import lists

Sort = Literal["name", "rms", "change", "nonfinite", "bytes", "zeros"]

Which = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=f"{SELECTED}.")]
By = Annotated[
    Sort, typer.Option("--sort", metavar="BY", help="Sort by name, rms, change, nonfinite, bytes or zeros; largest first.")
]
Group = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only this group.")]
Part = Annotated[str, typer.Option("--name", metavar="TEXT", help="Only tensors whose name contains this text.")]
First = Annotated[int, typer.Option("--first", metavar="N", min=0, help="Show at most N tensors; 0 for all.")]


def stats(  # noqa: PLR0913 — a command's options are its arguments
    checkpoint: Which,
    sort: By = "name",
    group: Group = None,
    name: Part = "",
    first: First = 0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show statistics of every tensor: NaN and infinities, range, mean, rms, zeros, and the change.

    The change is since the checkpoint before. The service computes them shortly after the commit, when it verifies the
    checkpoint.
    """
    with console.reporting(as_json):
        target = parse_target(checkpoint)
        if target.directory is not None:
            raise InvalidRequest(f"{checkpoint} is a directory; statistics need a service", hint="name RUN@STEP")
        with Api(url or default_url()) as api:
            statistics = list(islice(api.statistics(target.run, step_of(api, target), group, sort, name), first or None))
    console.listed(lists.STATISTICS, statistics, f"No tensor of {checkpoint} matches.", as_json)
