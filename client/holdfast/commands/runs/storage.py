"""`holdfast storage`: how much each run holds, and how old it is."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest import lists
from holdfast_formats.rest.runs import RunStorage

Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="Only runs whose names start with this.")]
First = Annotated[int, typer.Option("--first", metavar="N", min=0, help="Show at most N runs; 0 for all.")]


def storage(prefix: Prefix = "", first: First = 0, url: Url = None, as_json: AsJson = False) -> None:
    """Show storage by run and by the age of checkpoints. The largest come first."""
    with console.service(url, as_json) as api:
        found = list(islice(api.pages(lists.STORAGE.path, RunStorage, {"prefix": prefix or None}), first or None))
    console.listed(lists.STORAGE, found, "No run has a checkpoint.", as_json)
