"""`holdfast export` and `convert`: a Holdfast or foreign checkpoint as a new directory for another program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast.terminal.program_files import program_text
from holdfast_formats.errors import InvalidRequest, StorageFailed

from .import_ import AsIs, DryRun, Flat, Int16, Kind, LeaveOut, Shards, WeightsOnly, print_files, print_left_out

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.read.reader import CheckpointReader
    from holdfast_formats.rest.jobs import ExportArguments

LEFT_OUT_SHOWN = 20
STDOUT = "-"
KINDS = (
    "hf, trainer, peft, diffusers, dcp, megatron, deepspeed-universal, gguf, paddle-uc, paddle-flex, paddle-sharding-io "
    "or paddle-lora"
)

Target = Annotated[
    Path,
    typer.Argument(
        metavar="DEST",
        help="Target directory; it must be empty or not exist yet. With --as it must not exist; with --as and a service "
        "of another user or machine: a new path below its --export-root. - writes a tar archive to stdout.",
    ),
]
ModelOnly = Annotated[
    bool, typer.Option("--model-only", help="Export only the model and its assets: a plain Hugging Face directory.")
]
As = Annotated[
    str | None,
    typer.Option("--as", metavar="KIND", help=f"Export for another program: {KINDS}."),
]
Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Directory of a checkpoint, of any kind that `holdfast import` reads.")
]
NewTarget = Annotated[Path, typer.Argument(metavar="DEST", help="Target directory; it must not exist yet.")]
MadeAs = Annotated[str, typer.Option("--as", metavar="KIND", help=f"What to make: {KINDS}.")]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="GROUP", help="With --as hf or dcp, the weights: model, ema or master.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Convert the weights, to bf16 for example.")]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        help="The keys: with --as dcp fsdp, torchtitan or plain; with megatron stacked or by-number.",
    ),
]
Program = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="FILE", help="Map the tensors with this program: a file, or the name of a built-in one."
    ),
]


def export(  # noqa: PLR0913 - typer makes an option of each
    checkpoint: Checkpoint,
    target: Target,
    model_only: ModelOnly = False,
    kind: As = None,
    weights: Weights = None,
    dtype: Dtype = None,
    layout: Layout = None,
    program: Program = None,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint, also in the format of another program. Every byte is verified on the way.

    DEST gets its name only after the copy is complete and durable. A full export is a checkpoint itself and can be
    imported elsewhere. With --as, the directory is what another program loads; the report says what was converted
    and what was left out.
    """
    from holdfast.read.reader import CheckpointReader
    from holdfast_formats.rest.jobs import ExportArguments

    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        reader = CheckpointReader.open(source)
        arguments = ExportArguments(
            to=str(target),
            model_only=model_only,
            form=kind,
            weights=weights,
            dtype=dtype,
            layout=layout,
            program=None if program is None else program_text(program),
        )
        if str(target) == STDOUT:
            done = _piped(reader, model_only, arguments)
        elif kind is None:
            done = _copied(reader, target, model_only, as_json)
        else:
            done = _converted(reader, source, arguments, url, as_json)
    if str(target) == STDOUT:
        _print_done("exported", "the archive", done, console.err())
        return
    console.answer(done, lambda: _print_done("exported", target, done), as_json)


def convert(  # noqa: PLR0913 - typer makes an option of each
    source: Source,
    target: NewTarget,
    made_as: MadeAs,
    kind: Kind = None,
    weights: Weights = None,
    dtype: Dtype = None,
    layout: Layout = None,
    program: Program = None,
    as_is: AsIs = False,
    assemble_flat: Flat = False,
    int16: Int16 = None,
    shards: Shards = None,
    leave_out: LeaveOut = None,
    weights_only: WeightsOnly = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert between programs, directory to directory.

    It is an import and an export in one: what is not understood is refused by name, SRC must not change meanwhile, and
    every byte is read back before DEST gets its name. If it is killed, the same command goes on from the files that are
    finished.
    """
    from holdfast.rest import service_jobs
    from holdfast_formats.rest.jobs import ConvertArguments
    from holdfast_formats.rest.offline import DirectoryConversion

    with console.reporting(as_json):
        arguments = ConvertArguments(
            source=source,
            to=str(target),
            form=made_as,
            kind=kind,
            weights=weights,
            dtype=dtype,
            layout=layout,
            program=None if program is None else program_text(program),
            as_is=as_is,
            assemble_flat=assemble_flat,
            int16=int16,
            shards=shards,
            leave_out=tuple(leave_out or ()),
            weights_only=weights_only,
            dry_run=dry_run,
        )
        with console.told("converting", shown=not as_json) as on_bytes:
            done = service_jobs.offline(DirectoryConversion(arguments=arguments, progress=True), on_bytes)
    console.answer(done, lambda: _print_plan(done) if dry_run else _print_done("converted", target, done), as_json)


def _copied(reader: CheckpointReader, target: Path, model_only: bool, as_json: bool) -> dict[str, Any]:
    from holdfast.export.copy import export as export_to

    groups = ["model"] if model_only else []
    with console.progress("exporting", reader.manifest.bytes, shown=not as_json) as bar:
        copied = export_to(reader, target, groups, lambda count: bar.advance(bar.task_ids[0], count))
    return {"to": str(target), **copied._asdict()}


def _piped(reader: CheckpointReader, model_only: bool, arguments: ExportArguments) -> dict[str, Any]:
    from holdfast.export.tar_stream import stream

    if arguments.form is not None:
        raise InvalidRequest("--as writes a directory, not an archive", hint="pass a directory as DEST")
    if sys.stdout.isatty():
        raise InvalidRequest("an archive is not written to a terminal", hint="pipe it: … - | tar -x -C DIR")
    groups = ["model"] if model_only else []
    try:
        with console.progress("exporting", reader.manifest.bytes, shown=True) as bar:
            copied = stream(reader, sys.stdout.buffer, groups, lambda count: bar.advance(bar.task_ids[0], count))
    except OSError as error:
        raise StorageFailed(f"the archive cannot be written: {error.strerror}", hint="start it again") from error
    return copied._asdict()


def _converted(
    reader: CheckpointReader, source: object, arguments: ExportArguments, url: str | None, as_json: bool
) -> dict[str, Any]:
    """Run it in a program of the service, on this machine if the checkpoint is here, else as a job."""
    from holdfast.commands.jobs import finished
    from holdfast.read.sources import DirectorySource, HttpSource
    from holdfast.rest import service_jobs
    from holdfast_formats.rest.jobs import ConvertArguments, ExportJob
    from holdfast_formats.rest.offline import DirectoryConversion

    if not isinstance(source, HttpSource):
        terms = arguments.model_dump(exclude={"model_only"})
        at = str(source.path) if isinstance(source, DirectorySource) else reader.source.label
        conversion = ConvertArguments(source=at, kind="holdfast", **terms)
        with console.told("exporting", shown=not as_json) as on_bytes:
            done = service_jobs.offline(DirectoryConversion(arguments=conversion, progress=True), on_bytes)
        return {name: value for name, value in done.items() if name not in ("source", "written")}
    wanted = ExportJob(run=reader.manifest.run, step=reader.manifest.step, arguments=arguments)
    return finished(wanted, None, url, None if as_json else "exporting")


def _print_done(word: str, target: Path | str, done: dict[str, Any], out: Console | None = None) -> None:
    from rich.text import Text

    out = out or console.out()
    size = console.human_bytes(int(done["bytes"]))
    what = "a checkpoint" if done["committed"] else "a plain model directory"
    if "as" in done:
        what = f"as {done['as']}, {done['tensors']} tensors, read back"
    out.print(Text.assemble((f"{word}  ", "green"), f"{target}: {size} in {done['files']} files, {what}"))
    for note in done.get("notes", ()):
        out.print(Text.assemble(("note  ", "bold"), note))
    print_left_out(done.get("source", {}))
    left = done.get("left_out", ())
    for one in left[:LEFT_OUT_SHOWN]:
        out.print(Text.assemble(("left out  ", "yellow"), f"{one['what']}: {one['reason']}"))
    more = len(left) - LEFT_OUT_SHOWN + int(done.get("more_left_out", 0))
    if more > 0:
        out.print(f"and {more} more; --json lists them")


def _print_plan(done: dict[str, Any]) -> None:
    from rich.text import Text

    out = console.out()
    out.print(f"kind: {done['source']['kind']}")
    print_files(done["source"])
    table = console.table("FILE OF THE TARGET", "BYTES", right=("BYTES",))
    for file in done["written"]:
        table.add_row(Text(file["file"]), console.human_bytes(file["bytes"]))
    out.print(table)
    for one in (*done["notes"], *(f"left out: {left['what']}: {left['reason']}" for left in done["left_out"])):
        out.print(Text.assemble(("note  ", "bold"), one))
    size = console.human_bytes(int(done["bytes"]))
    what = f"{done['to']}: {done['tensors']} tensors, {size} in {done['files']} files; nothing was written"
    out.print(Text.assemble(("would convert  ", "yellow"), what))
