"""`holdfast restore`: a proven copy of a checkpoint in a directory, or what a rank of a layout holds of it in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from holdfast.export.copy import Copied, copy_checkpoint
from holdfast.read.library import open_source, parse_target
from holdfast.read.reader import CheckpointReader
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast_formats.errors import InvalidRequest

from . import shard

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="PATH", help="Where to: a directory that is empty or not there; with --rank a new file."),
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="GROUP", help="Only this group (can be given several times).")
]
Layout = Annotated[str | None, typer.Option("--layout", metavar="LAYOUT", help="Cut it for this layout, such as tp=4,pp=2.")]
Rank = Annotated[int | None, typer.Option("--rank", metavar="N", help="What this rank of the layout holds.")]
AllRanks = Annotated[
    Path | None, typer.Option("--all-ranks", metavar="DIR", help="What every rank holds, a file each, in this directory.")
]
Rules = Annotated[Path | None, typer.Option("--rules", metavar="FILE", help="A TOML file with your own models' rules.")]
Plan = Annotated[
    bool, typer.Option("--plan", "--dry-run", help="Only print what the rank, or every rank, would hold and read.")
]


def restore(  # noqa: PLR0913 - a command's options are its arguments
    checkpoint: Checkpoint,
    out: Out = None,
    group: Groups = None,
    layout: Layout = None,
    rank: Rank = None,
    all_ranks: AllRanks = None,
    rules: Rules = None,
    plan: Plan = False,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint, proving every byte on the way: as it is into a directory, or cut for a layout into files.

    Without --layout, the copy is a checkpoint again once its COMMIT is there, which is written last. With --group it is a
    plain Hugging Face directory: these groups' files, their indexes and the assets.

    With --layout and --rank, the file is a safetensors file of what that rank holds of one group (model if not said); its
    header is written last. With --layout alone, or --plan, only what ranks would hold is printed.
    """
    with console.reporting(as_json):
        if layout is not None:
            wanted = shard.ShardRequest(layout, rank, _one(group), rules)
            with open_source(parse_target(checkpoint), root, url) as source:
                shard.restore(source, wanted, shard.Into(out, all_ranks, plan), as_json)
            return
        if plan or rules is not None or rank is not None or all_ranks is not None:
            raise InvalidRequest("--rank, --all-ranks, --rules and --plan need a layout", hint="add --layout tp=4,pp=2")
        if out is None:
            raise InvalidRequest("nothing says where the copy goes", hint="give --out DIR")
        with open_source(parse_target(checkpoint), root, url) as source:
            reader = CheckpointReader.open(source)
            with console.progress("restoring", reader.manifest.bytes, shown=not as_json) as bar:
                copied = copy_checkpoint(reader, out, group or [], lambda count: bar.advance(bar.task_ids[0], count))
        _print(out, copied, as_json)


def _one(groups: list[str] | None) -> str:
    if groups and len(groups) > 1:
        raise InvalidRequest(f"a layout's file holds one group, not {len(groups)}", hint="call it once for each --group")
    return groups[0] if groups else "model"


def _print(out: Path, copied: Copied, as_json: bool) -> None:
    if as_json:
        console.print_json({"out": str(out), "files": copied.files, "bytes": copied.bytes, "committed": copied.committed})
        return
    what = "a checkpoint" if copied.committed else "a plain directory of these groups"
    size = console.human_bytes(copied.bytes)
    console.out().print(Text.assemble(("restored  ", "green"), f"{out}: {size} in {copied.files} files, {what}"))
