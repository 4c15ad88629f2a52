"""`holdfast rm`: remove one checkpoint."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from holdfast.config import default_url
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.retention import Force

from .marks import Checkpoint, named

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing; only check whether it could be removed.")]
Forced = Annotated[
    str | None,
    typer.Option(
        "--force", metavar="WHICH", help=f"Remove it although it is the {' or the '.join(retention.FORCES)} checkpoint."
    ),
]


def rm(
    checkpoint: Checkpoint,
    yes: Yes = False,
    dry_run: DryRun = False,
    force: Forced = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Remove a checkpoint. This needs the service, because only it knows about readers, pins and labels."""
    with console.reporting(as_json):
        run, step = named(checkpoint)
        which = _which(force)
        with Api(url or default_url()) as api:
            found = retention.try_remove(api, run, step, which)
            if not yes and not dry_run:
                if as_json:
                    raise InvalidRequest("nothing was removed: --json needs --yes")
                question = f"Remove {run}@{step} ({console.human_bytes(found.bytes)}) from {api.url}?"
                typer.confirm(question, abort=True, err=True)
            if not dry_run:
                retention.remove(api, run, step, which)
    if as_json:
        console.print_json({"would remove" if dry_run else "removed": found.model_dump()})
    else:
        console.out().print(f"{'would remove' if dry_run else 'removed'} {run}@{step}", markup=False)


def _which(force: str | None) -> Force | None:
    if force is not None and force not in retention.FORCES:
        raise InvalidRequest(f"--force {force!r} is not known", hint=f"one of {', '.join(retention.FORCES)}")
    return cast("Force | None", force)
