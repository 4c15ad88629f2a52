"""`holdfast export`: a checkpoint, or its model, as a directory of its own that appears when it is complete."""

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

Target = Annotated[Path, typer.Argument(metavar="DEST", help="Where to: a directory that is empty or not there yet.")]
ModelOnly = Annotated[
    bool, typer.Option("--model-only", help="The model and the files beside it: a plain Hugging Face directory.")
]


def export(
    checkpoint: Checkpoint,
    target: Target,
    model_only: ModelOnly = False,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint out, proving every byte on the way. DEST has its name only once it is complete and durable.

    What is exported whole is a checkpoint, and can be imported anywhere.
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
