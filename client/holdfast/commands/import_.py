"""`holdfast import` and `holdfast merge`: create a checkpoint from others."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any, Literal

import typer

from holdfast.read.checkpoint_index import open_library, parse_target
from holdfast.read.checkpoint_root import root_of
from holdfast.terminal import console
from holdfast.terminal.options import AnyRoot, AsJson, NamedRoot, Url
from holdfast.terminal.program_files import file_text, program_text
from holdfast_formats.errors import InvalidRequest

FILES_SHOWN = 40

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Source directory or file. With a daemon of another user or machine: below its --export-root."
    ),
]
Wanted = Annotated[str, typer.Argument(metavar="RUN@STEP", help="Run and step of the new checkpoint.")]
Kind = Annotated[str | None, typer.Option("--from", metavar="KIND", help="The kind of SRC, if several fit.")]
Program = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="FILE", help="Map the tensors with this program: a file, or the name of a built-in one."
    ),
]
AsIs = Annotated[bool, typer.Option("--as-is", help="Keep the source's names and layouts; do not convert them to torch's.")]
Flat = Annotated[
    bool, typer.Option("--assemble-flat", help="Join Paddle's flat slices that lack metadata, in the order of the files.")
]
Int16 = Annotated[
    Literal["integers", "bfloat16"] | None,
    typer.Option(
        "--int16", metavar="integers|bfloat16", help="How to read 16-bit integers of SRC: as integers, or as bfloat16."
    ),
]
Shards = Annotated[
    int | None,
    typer.Option("--shards", metavar="N", min=1, help="Number of ranks that wrote shards, if SRC does not record it."),
]
LeaveOut = Annotated[
    list[str] | None,
    typer.Option(
        "--leave-out",
        metavar="PATTERN",
        help="Leave out keys, tensors, values or files of SRC by name: optimizer, 'extra/*'. May be given several times.",
    ),
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="Only the weights of the model or adapter; list what else SRC has.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be imported; write nothing.")]

RECIPE_BYTES_MAX = 2**15

Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe's YAML file; with --average-last, the run whose steps are averaged."),
]
Last = Annotated[
    int | None, typer.Option("--average-last", metavar="K", min=1, help="Average the newest K checkpoints of a run.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Type of the average: float32, bfloat16 or float16.")
]


def import_(  # noqa: PLR0913 - typer makes an option of each
    source: Source,
    checkpoint: Wanted,
    kind: Kind = None,
    program: Program = None,
    as_is: AsIs = False,
    assemble_flat: Flat = False,
    int16: Int16 = None,
    shards: Shards = None,
    leave_out: LeaveOut = None,
    weights_only: WeightsOnly = False,
    dry_run: DryRun = False,
    root: AnyRoot = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Import a checkpoint of another program. Every byte is digested, written, and read
    back before the commit.

    What SRC is follows from its files. What is not understood is refused by name, unless you leave it out: nothing is
    left out without a reason, which the report gives. A Holdfast checkpoint is verified on the way and keeps all its
    groups. A daemon of yours on this machine reads any directory of yours, with --root too; a service elsewhere does it
    as a job.
    """
    from holdfast.commands.jobs import finished
    from holdfast.commands.labels_and_pins import named
    from holdfast_formats.rest.jobs import ImportArguments, ImportJob

    with console.reporting(as_json):
        run, step = named(checkpoint)
        arguments = ImportArguments(
            source=source,
            kind=kind,
            program=None if program is None else program_text(program),
            as_is=as_is,
            assemble_flat=assemble_flat,
            int16=int16,
            shards=shards,
            leave_out=tuple(leave_out or ()),
            weights_only=weights_only,
            dry_run=dry_run,
        )
        wanted = ImportJob(run=run, step=step, arguments=arguments)
        done = finished(wanted, root, url, None if as_json else "importing")
    console.answer(done, lambda: _print_imported(done, f"{run}@{step}", dry_run), as_json)


def _print_imported(done: dict[str, Any], checkpoint: str, dry_run: bool) -> None:
    from rich.text import Text

    if dry_run:
        _print_report(done)
    size = console.human_bytes(int(done["bytes"]))
    what = f"{checkpoint}: {done['tensors']} tensors, {size} in {done['files']} files"
    if dry_run:
        console.out().print(Text.assemble(("would import  ", "yellow"), f"{what}; nothing was written"))
        return
    console.out().print(Text.assemble(("imported  ", "green"), f"{what}, verified"))
    source = done.get("source", {})
    for note in source.get("notes", []):
        console.out().print(Text.assemble(("note  ", "bold"), note))
    print_left_out(source)


def _print_report(done: dict[str, Any]) -> None:
    from holdfast_formats.rest import lists

    source = done["source"]
    console.out().print(f"kind: {source['kind']}")
    console.out().print(console.table_of(lists.GROUPS, sorted(done.get("groups", {}).items())))
    print_files(source)


def print_files(source: dict[str, Any]) -> None:
    """Print every file of a source, its use, and the notes."""
    from rich.text import Text

    from holdfast_formats.rest import lists

    out = console.out()
    out.print(console.table_of(lists.SOURCE_FILES, source["files"][:FILES_SHOWN]))
    more = len(source["files"]) - FILES_SHOWN + source.get("more_files", 0)
    if more > 0:
        out.print(f"and {more} more files; --json lists them")
    for note in source["notes"]:
        out.print(Text.assemble(("note  ", "bold"), note))
    print_left_out(source)


def print_left_out(source: dict[str, Any]) -> None:
    """Print what of a source was left out by choice."""
    from rich.text import Text

    left = source.get("left_out", [])
    for one in left[:FILES_SHOWN]:
        count = one["tensors"]
        size = f"{count} {'tensor' if count == 1 else 'tensors'}, " if count else ""
        what = f"{one['what']} ({size}{console.human_bytes(one['bytes'])})" if one["bytes"] else one["what"]
        console.out().print(Text.assemble(("left out  ", "yellow"), f"{what}: {one['reason']}"))
    more = len(left) - FILES_SHOWN + source.get("more_left_out", 0)
    if more > 0:
        console.out().print(f"and {more} more; --json lists them")


def merge(  # noqa: PLR0913 - typer makes an option of each
    recipe: Recipe,
    checkpoint: Wanted,
    average_last: Last = None,
    dtype: Dtype = None,
    dry_run: DryRun = False,
    root: AnyRoot = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Merge checkpoints of one architecture into a new one. The recipe has mergekit's format; the result is read back
    before the commit.

    Models are checkpoints (RUN@STEP) or directories, with an adapter as MODEL+ADAPTER. Names, shapes and types that do
    not match, and whatever is not understood in the recipe, are refused by name. A daemon of yours on this machine
    reads any directory of yours, with --root too; a service elsewhere does it as a job.
    """
    from holdfast.commands.jobs import finished
    from holdfast.commands.labels_and_pins import named
    from holdfast_formats.rest.jobs import MergeArguments, MergeJob

    with console.reporting(as_json):
        run, step = named(checkpoint)
        if average_last is None and dtype is not None:
            raise InvalidRequest("--dtype is valid only with --average-last", hint="set `dtype` in the recipe")
        text = (
            file_text(recipe, RECIPE_BYTES_MAX, "pass a recipe's file, or --average-last K with a run's name")
            if average_last is None
            else _average(recipe, average_last, dtype, root, url)
        )
        wanted = MergeJob(run=run, step=step, arguments=MergeArguments(recipe=text, dry_run=dry_run))
        done = finished(wanted, root, url, None if as_json else "merging")
    console.answer(done, lambda: _print_merged(done, f"{run}@{step}", dry_run), as_json)


def _average(run: str, count: int, dtype: str | None, root: NamedRoot | None, url: str | None) -> str:
    """A recipe for the mean of the newest checkpoints of a run."""
    from holdfast_formats.rest.recipes import average_of_last

    target = parse_target(run)
    if target.directory is not None or run != target.run:
        raise InvalidRequest(
            f"{run!r} is not the name of a run", hint="with --average-last, pass a run's name without a step"
        )
    with closing(open_library(None if root is None else root_of(root.label), url)) as library:
        listed = library.checkpoints(target.run).checkpoints
    return average_of_last(target.run, listed, count, dtype)


def _print_merged(done: dict[str, Any], checkpoint: str, dry_run: bool) -> None:
    from rich.text import Text

    out, source = console.out(), done["source"]
    size = console.human_bytes(int(done["bytes"]))
    what = f"{checkpoint}: {done['tensors']} tensors, {size} in {done['files']} files, from {len(source['models'])} sources"
    if dry_run:
        out.print(Text.assemble(("would merge  ", "yellow"), f"{what}; nothing was written"))
    else:
        out.print(Text.assemble(("merged  ", "green"), f"{what}, verified"))
    for note in source["notes"]:
        out.print(Text.assemble(("note  ", "bold"), note))
