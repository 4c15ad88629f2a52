"""`holdfast export`: copy a checkpoint, or only its model, into a new directory that appears when it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.export.publish import export as export_to
from holdfast.read.library import open_source, parse_target
from holdfast.read.reader import CheckpointReader
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url

Target = Annotated[Path, typer.Argument(metavar="DEST", help="Target directory; it must be empty or not exist yet.")]
ModelOnly = Annotated[
    bool, typer.Option("--model-only", help="Export only the model and its assets: a plain Hugging Face directory.")
]


def export(
    checkpoint: Checkpoint,
    target: Target,
    model_only: ModelOnly = False,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to a directory and verify every byte on the way.

    DEST gets its name only after the copy is complete and durable. A full export is a checkpoint itself and can be
    imported elsewhere.
    """
    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        reader = CheckpointReader.open(source)
        groups = ["model"] if model_only else []
        with console.progress("exporting", reader.manifest.bytes, shown=not as_json) as bar:
            copied = export_to(reader, target, groups, lambda count: bar.advance(bar.task_ids[0], count))
    if as_json:
        console.print_json({"to": str(target), **copied._asdict()})
        return
    what = "a checkpoint" if copied.committed else "a plain directory of the model"
    size = console.human_bytes(copied.bytes)
    console.out().print(Text.assemble(("exported  ", "green"), f"{target}: {size} in {copied.files} files, {what}"))
