"""`holdfast restore`: a proven copy of a checkpoint, or of some groups of it, in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast import console
from holdfast.copying import Copied, copy_checkpoint
from holdfast.library import open_source, parse_target
from holdfast.reader import CheckpointReader

from .options import AsJson, Checkpoint, Root, Url

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to: a directory that is empty or not there yet.")]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="GROUP", help="Only this group (can be given several times).")
]


def restore(
    checkpoint: Checkpoint, out: Out, group: Groups = None, root: Root = None, url: Url = None, as_json: AsJson = False
) -> None:
    """Copy a checkpoint into a directory, proving every byte on the way.

    The copy is a checkpoint again once its COMMIT is there, which is written last. With --group it is a plain Hugging Face
    directory: these groups' files, their indexes and the assets.
    """
    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        reader = CheckpointReader.open(source)
        with console.progress("restoring", reader.manifest.bytes, shown=not as_json) as bar:
            copied = copy_checkpoint(reader, out, group or [], lambda count: bar.advance(bar.task_ids[0], count))
    _print(out, copied, as_json)


def _print(out: Path, copied: Copied, as_json: bool) -> None:
    if as_json:
        console.print_json({"out": str(out), "files": copied.files, "bytes": copied.bytes, "committed": copied.committed})
        return
    what = "a checkpoint" if copied.committed else "a plain directory of these groups"
    size = console.human_bytes(copied.bytes)
    console.out().print(Text.assemble(("restored  ", "green"), f"{out}: {size} in {copied.files} files, {what}"))
