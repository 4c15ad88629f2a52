"""`holdfast rm RUN`, `undelete` and `trash`: delete a run, restore it, and list deleted runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.terminal import completion, console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast_formats.rest.runs import Trash, TrashedRun

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run that was deleted.", autocompletion=completion.deleted)]
Entry = Annotated[
    str | None, typer.Option("--entry", metavar="ENTRY", help="Which deletion of the run: an ENTRY of `holdfast trash`.")
]
Empty = Annotated[str | None, typer.Option("--empty", metavar="RUN", help="Remove this deleted run for good.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def remove_run(run: str, url: str | None, *, marked: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Delete a whole run, after asking."""
    from holdfast.rest import runs

    with console.service(url, as_json) as api:
        trashed = runs.delete(api, run, marked, dry_run=True)
        if not yes and not dry_run:
            console.confirm(f"Delete the run {run} ({_size(trashed)}) from {api.url}?", "nothing was deleted", as_json)
        if not dry_run:
            trashed = runs.delete(api, run, marked)
    if as_json:
        console.print_json({"would delete" if dry_run else "deleted": trashed})
        return
    console.out().print(f"{'would delete' if dry_run else 'deleted'} {run} ({_size(trashed)})", markup=False)
    if not dry_run and trashed.checkpoints:
        until = f" until {trashed.expires}" if trashed.expires else ""
        console.err().print(f"`holdfast undelete {run}` brings it back{until}", markup=False)


def undelete(run: Run, entry: Entry = None, url: Url = None, as_json: AsJson = False) -> None:
    """Bring a deleted run back from the trash."""
    from holdfast.rest import runs

    with console.service(url, as_json) as api:
        restored = runs.undelete(api, run, entry)
    console.answer({"undeleted": restored}, f"brought {run} back ({_size(restored)})", as_json)


def trash(empty: Empty = None, entry: Entry = None, yes: Yes = False, url: Url = None, as_json: AsJson = False) -> None:
    """List deleted runs that can be brought back."""
    from holdfast.rest import runs

    with console.service(url, as_json) as api:
        if empty is None:
            if entry is not None:
                raise InvalidRequest("--entry needs --empty RUN", hint="holdfast undelete RUN --entry ENTRY brings it back")
            found = runs.trash(api)
        else:
            if not yes:
                console.confirm(f"Remove the deleted run {empty} for good?", "nothing was removed", as_json)
            found = runs.empty_trash(api, empty, entry)
    if as_json:
        console.print_json(found)
    elif empty is not None:
        console.out().print(f"removed {console.human_bytes(found.bytes)} of {empty} for good", markup=False)
    else:
        _show(found)


def _show(trash: Trash) -> None:
    from holdfast_formats.rest import lists

    if not trash.items:
        console.out().print("The trash is empty.")
        return
    console.show(console.table_of(lists.TRASH, trash.items))
    console.out().print(f"{console.human_bytes(trash.bytes)} in total; removed first when the disk is full", markup=False)


def _size(trashed_run: TrashedRun) -> str:
    count = "1 checkpoint" if trashed_run.checkpoints == 1 else f"{trashed_run.checkpoints} checkpoints"
    return f"{count}, {console.human_bytes(trashed_run.bytes)}"
