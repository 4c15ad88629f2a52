"""`holdfast restore`: copy a checkpoint, or write the shards of any parallel layout as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast.terminal.program_files import program_text
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.export.copy import Copied

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="PATH", help="Target: an empty or new directory; with --rank a new file."),
]
Groups = Annotated[list[str] | None, typer.Option("--group", metavar="GROUP", help="Only this group; repeatable.")]
Layout = Annotated[
    str | None, typer.Option("--layout", metavar="LAYOUT", help="Reshard for this parallel layout, such as tp=4,pp=2.")
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="N", help="Write the shard of this rank of the layout.")]
AllRanks = Annotated[
    Path | None,
    typer.Option("--all-ranks", metavar="DIR", help="Write the shards of all ranks into this directory, one file each."),
]
Rules = Annotated[Path | None, typer.Option("--rules", metavar="FILE", help="A TOML file with rules for your own models.")]
Through = Annotated[
    str | None,
    typer.Option("--program", metavar="PROGRAM", help="Map the tensors with this program: a name, or a TOML file."),
]
Plan = Annotated[bool, typer.Option("--plan", "--dry-run", help="Only print what each rank would hold and read.")]


def restore(  # noqa: PLR0913 - a command's options are its arguments
    checkpoint: Checkpoint,
    out: Out = None,
    group: Groups = None,
    layout: Layout = None,
    rank: Rank = None,
    all_ranks: AllRanks = None,
    rules: Rules = None,
    program: Through = None,
    plan: Plan = False,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint, as it is or resharded for ranks. Every byte is verified on the way.

    Without --layout, the copy is a directory that becomes a checkpoint once its COMMIT is written, which happens last.
    With --group it is a plain Hugging Face directory: the files of these groups, their indexes and the assets.

    With --layout and --rank, the output is a safetensors file with that rank's shard of one group (default:
    model); its header is written last. With --layout alone, or --plan, only the shards are printed.
    """
    from holdfast.export.copy import copy_checkpoint
    from holdfast.layout.rules_choice import program_of
    from holdfast.read.reader import CheckpointReader

    from . import shard

    with console.reporting(as_json):
        if layout is not None:
            through = program_of(None if program is None else program_text(program))
            wanted = shard.ShardRequest(layout, rank, _one(group), rules, through)
            with open_source(parse_target(checkpoint), root, url) as source:
                shard.restore(source, wanted, shard.Into(out, all_ranks, plan), as_json)
            return
        if plan or any(option is not None for option in (rules, rank, all_ranks, program)):
            raise InvalidRequest(
                "--rank, --all-ranks, --rules, --program and --plan need a layout", hint="add --layout tp=4,pp=2"
            )
        if out is None:
            raise InvalidRequest("no target for the copy", hint="pass --out DIR")
        with open_source(parse_target(checkpoint), root, url) as source:
            reader = CheckpointReader.open(source)
            with console.progress("restoring", reader.manifest.bytes, shown=not as_json) as bar:
                copied = copy_checkpoint(reader, out, group or [], lambda count: bar.advance(bar.task_ids[0], count))
        _print(out, copied, as_json)


def _one(groups: list[str] | None) -> str:
    if groups and len(groups) > 1:
        raise InvalidRequest(
            f"with --layout, only one group can be written at a time, not {len(groups)}",
            hint="run the command once for each --group",
        )
    return groups[0] if groups else "model"


def _print(out: Path, copied: Copied, as_json: bool) -> None:
    from rich.text import Text

    if as_json:
        console.print_json({"out": str(out), "files": copied.files, "bytes": copied.bytes, "committed": copied.committed})
        return
    what = "a checkpoint" if copied.committed else "a plain directory of these groups"
    size = console.human_bytes(copied.bytes)
    console.out().print(Text.assemble(("restored  ", "green"), f"{out}: {size} in {copied.files} files, {what}"))
