"""`holdfast note`, `acknowledge`, `archive` and `rename`: owner, notes and tags of a run, acknowledged deaths, the
archive, its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.terminal import completion, console
from holdfast.terminal.options import AsJson, Url

if TYPE_CHECKING:
    from holdfast_formats.rest.runs import RunAbout, RunChange

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run.", autocompletion=completion.runs)]
Owner = Annotated[
    str | None,
    typer.Option(
        "--owner", metavar="NAME", help="The contact of the run; an empty value restores the one that the trainer set."
    ),
]
Notes = Annotated[
    str | None,
    typer.Option("--notes", metavar="TEXT", help="Replace the notes; an empty value restores the one that the trainer set."),
]
Tag = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Add a tag; may be repeated.", autocompletion=completion.tags),
]
Untag = Annotated[
    list[str] | None,
    typer.Option("--untag", metavar="TAG", help="Remove a tag; may be repeated.", autocompletion=completion.tags),
]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="The new name.")]
Undo = Annotated[bool, typer.Option("--undo", help="Unarchive it.")]


def note(  # noqa: PLR0913 — one an option
    run: Run,
    owner: Owner = None,
    notes: Notes = None,
    tag: Tag = None,
    untag: Untag = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Set or show owner, notes and tags of a run."""
    from holdfast.rest import runs
    from holdfast_formats.rest.runs import RunChange

    if owner is None and notes is None and not tag and not untag:
        with console.service(url, as_json) as api:
            metadata = runs.about(api, run)
        _show(metadata, as_json)
        return
    _change(run, RunChange(owner=owner, notes=notes, tag=tag, untag=untag), url, as_json)


def acknowledge(run: Run, undo: Undo = False, url: Url = None, as_json: AsJson = False) -> None:
    """Acknowledge that a run has died. The run is then idle, and raises no alert until it dies again."""
    from holdfast_formats.rest.runs import RunChange

    _change(run, RunChange(acknowledged=not undo), url, as_json)


def archive(run: Run, undo: Undo = False, url: Url = None, as_json: AsJson = False) -> None:
    """Archive a run: it keeps its checkpoints and raises no alerts. Only `holdfast ls --all` lists it."""
    from holdfast_formats.rest.runs import RunChange

    _change(run, RunChange(archived=not undo), url, as_json)


def rename(run: Run, name: NewName, url: Url = None, as_json: AsJson = False) -> None:
    """Rename a run without connected ranks. Nothing is copied; the checkpoints get new manifests."""
    from holdfast.rest import runs

    with console.service(url, as_json) as api:
        renamed = runs.rename(api, run, name)
    if as_json:
        console.print_json({"renamed": renamed.model_dump(), "to": name})
    else:
        console.out().print(f"renamed {run} to {name}", markup=False)
        for step, why in sorted(renamed.damaged.items()):
            console.out().print(
                f"{name}@{step} was already damaged before: {why}; repair it with `holdfast repair {name}@{step}`"
            )


def _change(run: str, change: RunChange, url: str | None, as_json: bool) -> None:
    from holdfast.rest import runs

    with console.service(url, as_json) as api:
        metadata = runs.change(api, run, change)
    _show(metadata, as_json)


def _show(metadata: RunAbout, as_json: bool) -> None:
    from holdfast.terminal import run_description

    if as_json:
        console.print_json(metadata)
        return
    out = console.out()
    for line in run_description.lines(metadata):
        out.print(line)
