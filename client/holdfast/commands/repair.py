"""`holdfast repair`: repair the damaged files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.commands.jobs import finished
from holdfast.commands.labels_and_pins import named
from holdfast.terminal import console
from holdfast.terminal.options import AnyRoot, AsJson, Url
from holdfast_formats.errors import InvalidRequest, RootBusy
from holdfast_formats.rest.jobs import VerifyArguments, VerifyJob

Wanted = Annotated[str, typer.Argument(metavar="RUN@STEP", help="The damaged checkpoint.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="DIR", help="With --root: a replica's directory; repeatable."),
]


def repair(
    checkpoint: Wanted, sources: Sources = None, root: AnyRoot = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Read a checkpoint back and repair damaged files. Sources: replicas, the in-memory checkpoint, the manifest.

    Replacement bytes are verified first. A daemon repairs from its own replicas, also with --root of the directory that it
    serves. --from names replica directories; it needs --root, and no daemon there. Exit status 5 if damage remains.
    """
    with console.reporting(as_json):
        run, step = named(checkpoint)
        if sources and root is None:
            raise InvalidRequest("--from needs --root", hint="add --root DIR; a daemon uses its own --replica directories")
        wanted = VerifyJob(run=run, step=step, arguments=VerifyArguments(repair=True))
        try:
            done = finished(wanted, root, url, replicas=sources or ())
        except RootBusy as error:
            hint = f"stop the daemon during the repair, or let it repair: `holdfast repair {run}@{step}`"
            raise RootBusy(error.detail, hint=hint, **error.members) from None
    console.answer(done, lambda: _print(f"{run}@{step}", done), as_json)


def _print(what: str, done: dict[str, Any]) -> None:
    out = console.out()
    repaired = done.get("repaired", [])
    if not repaired:
        out.print(Text.assemble(("intact  ", "green"), f"{what} matches its digests"))
    for file in repaired:
        text = file if isinstance(file, str) else f"{file['file']} from {file['source']}"
        out.print(Text.assemble(("repaired  ", "green"), f"{what}: {text}"))
