"""`holdfast stats`: statistics of a checkpoint's tensors."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Literal

import typer
from rich.text import Text

from holdfast.config import default_url
from holdfast.read.checkpoint_index import of_service, step_of
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import SELECTED, AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import lists
from holdfast_formats.rest.measurements import TensorHistogram

MODEL = "model"
BINS_A_ROW, BAR = 3, 40
Sort = Literal["name", "rms", "change", "nonfinite", "bytes", "zeros"]

Which = Annotated[str, typer.Argument(metavar="CHECKPOINT", help=f"{SELECTED}.")]
By = Annotated[
    Sort, typer.Option("--sort", metavar="BY", help="Sort by name, rms, change, nonfinite, bytes or zeros; largest first.")
]
Group = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only this group.")]
Part = Annotated[str, typer.Option("--name", metavar="TEXT", help="Only tensors whose name contains this text.")]
Of = Annotated[
    str | None, typer.Option("--histogram", metavar="TENSOR", help="Show how often each value occurs in this tensor.")
]
Minus = Annotated[
    str | None, typer.Option("--minus", metavar="STEP", help="With --histogram: show the change since this step of the run.")
]
First = Annotated[int, typer.Option("--first", metavar="N", min=0, help="Show at most N tensors; 0 for all.")]


def stats(  # noqa: PLR0913 — a command's options are its arguments
    checkpoint: Which,
    sort: By = "name",
    group: Group = None,
    name: Part = "",
    first: First = 0,
    histogram: Of = None,
    minus: Minus = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show statistics of every tensor. These are NaN and infinities, range, mean, rms, zeros, and the change.

    The change is since the checkpoint before. The service computes them shortly after the commit, when it verifies the
    checkpoint.
    """
    with console.reporting(as_json):
        target = of_service(checkpoint)
        if minus is not None and histogram is None:
            raise InvalidRequest("--minus needs --histogram", hint="pass --histogram TENSOR")
        with Api(url or default_url()) as api:
            if histogram is not None:
                path = f"/v1/runs/{target.run}/checkpoints/{step_of(api, target)}/histogram"
                asked = {"group": group or MODEL, "name": histogram} | ({} if minus is None else {"minus": minus})
                counted = api.parsed(api.request("GET", path, params=asked).content, TensorHistogram)
                console.print_json(counted.model_dump()) if as_json else _draw(counted)
                return
            statistics = list(islice(api.statistics(target.run, step_of(api, target), group, sort, name), first or None))
    console.listed(lists.STATISTICS, statistics, f"No tensor of {checkpoint} matches.", as_json)


def _draw(found: TensorHistogram) -> None:
    """A bar for each few bins, from its smallest value on."""
    out = console.out()
    out.print(Text(f"{found.elements} values, {found.nonfinite} not finite", "bold"))
    if found.minimum is None or found.maximum is None:
        return
    bins = len(found.counts)
    rows = [sum(found.counts[at : at + BINS_A_ROW]) for at in range(0, bins, BINS_A_ROW)]
    for number, count in enumerate(rows):
        share = number * BINS_A_ROW / bins
        value = found.minimum * (1 - share) + found.maximum * share
        out.print(Text(f"{value:>11.4g}  {'█' * round(BAR * count / max(rows)):<{BAR}}  {count}"))
    out.print(Text(f"{found.maximum:>11.4g}"))
