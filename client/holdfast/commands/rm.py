"""`holdfast rm`: remove one checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import console
from holdfast.api import Api
from holdfast.config import default_url
from holdfast.library import parse_target
from holdfast_formats.errors import InvalidRequest

from .options import AsJson, Url

Checkpoint = Annotated[str, typer.Argument(metavar="RUN@STEP", help="The checkpoint; its step has to be named.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def rm(checkpoint: Checkpoint, yes: Yes = False, url: Url = None, as_json: AsJson = False) -> None:
    """Remove a checkpoint. Only the service can, because it knows who reads it and what is pinned."""
    with console.reporting(as_json):
        target = parse_target(checkpoint)
        if target.step is None:
            raise InvalidRequest(f"{checkpoint!r} names no step", hint="give RUN@STEP: what is removed is never guessed")
        with Api(url or default_url()) as api:
            found = api.checkpoint(target.run, target.step)
            if not yes:
                if as_json:
                    raise InvalidRequest("nothing was removed: with --json, --yes has to be given")
                question = f"Remove {found.run}@{found.step} ({console.human_bytes(found.bytes)}) from {api.url}?"
                typer.confirm(question, abort=True, err=True)
            api.remove(found.run, found.step)
    if as_json:
        console.print_json({"removed": found.model_dump()})
    else:
        console.out().print(f"removed {found.run}@{found.step}", markup=False)
