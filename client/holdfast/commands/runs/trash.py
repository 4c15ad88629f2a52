"""`holdfast rm RUN`, `undelete` and `trash`: delete a run, restore it, and list deleted runs."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.config import default_url
from holdfast.rest import runs
from holdfast.rest.api import Api
from holdfast.terminal import completion, console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import lists
from holdfast_formats.rest.runs import Trash, TrashedRun

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run that was deleted.", autocompletion=completion.deleted)]
Entry = Annotated[
    str | None, typer.Option("--entry", metavar="ENTRY", help="As it was deleted then: a name that `holdfast trash` shows.")
]
Empty = Annotated[str | None, typer.Option("--empty", metavar="RUN", help="Remove what was deleted of this run for good.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def remove_run(run: str, url: str | None, *, marked: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Delete a whole run, after asking."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        trashed = runs.delete(api, run, marked, dry_run=True)
        if not yes and not dry_run:
            if as_json:
                raise InvalidRequest("nothing was deleted: --json needs --yes")
            typer.confirm(f"Delete the run {run} ({_size(trashed)}) from {api.url}?", abort=True, err=True)
        if not dry_run:
            trashed = runs.delete(api, run, marked)
    if as_json:
        console.print_json({"would delete" if dry_run else "deleted": trashed.model_dump()})
        return
    console.out().print(f"{'would delete' if dry_run else 'deleted'} {run} ({_size(trashed)})", markup=False)
    if not dry_run and trashed.checkpoints:
        until = f" until {trashed.expires}" if trashed.expires else ""
        console.err().print(f"`holdfast undelete {run}` brings it back{until}", markup=False)


def undelete(run: Run, entry: Entry = None, url: Url = None, as_json: AsJson = False) -> None:
    """Bring a deleted run back from the trash."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        restored = runs.undelete(api, run, entry)
    if as_json:
        console.print_json({"undeleted": restored.model_dump()})
    else:
        console.out().print(f"brought {run} back ({_size(restored)})", markup=False)


def trash(empty: Empty = None, entry: Entry = None, yes: Yes = False, url: Url = None, as_json: AsJson = False) -> None:
    """List deleted runs that can be brought back, and the space that they take."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        if empty is None:
            if entry is not None:
                raise InvalidRequest("--entry needs --empty RUN", hint="holdfast undelete RUN --entry ENTRY brings it back")
            found = runs.trash(api)
        else:
            if not yes:
                if as_json:
                    raise InvalidRequest("nothing was removed: --json needs --yes")
                typer.confirm(f"Remove what was deleted of {empty} for good?", abort=True, err=True)
            found = runs.empty_trash(api, empty, entry)
    if as_json:
        console.print_json(found.model_dump())
    elif empty is not None:
        console.out().print(f"removed {console.human_bytes(found.bytes)} of {empty} for good", markup=False)
    else:
        _show(found)


def _show(trash: Trash) -> None:
    if not trash.items:
        console.out().print("The trash is empty.")
        return
    console.show(console.table_of(lists.TRASH, trash.items))
    console.out().print(f"{console.human_bytes(trash.bytes)} in all; it goes first when the disk is full", markup=False)


def _size(trashed_run: TrashedRun) -> str:
    count = "1 checkpoint" if trashed_run.checkpoints == 1 else f"{trashed_run.checkpoints} checkpoints"
    return f"{count}, {console.human_bytes(trashed_run.bytes)}"
