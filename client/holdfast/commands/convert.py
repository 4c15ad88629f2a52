"""`holdfast convert`: make a directory for another program of one of a third program, with no root and no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.rest import delegated
from holdfast.terminal import console
from holdfast.terminal.options import AsJson
from holdfast.terminal.program_files import program_text

from .export import Dtype, Layout, Program, Weights, print_done
from .import_ import AsIs, DryRun, Flat, Kind, options_of, print_files

Source = Annotated[str, typer.Argument(metavar="SRC", help="Directory of a checkpoint of any kind that import reads.")]
Target = Annotated[Path, typer.Argument(metavar="DEST", help="Target directory; it must not exist yet.")]
As = Annotated[str, typer.Option("--as", metavar="KIND", help="What to make: hf, peft, dcp, paddle-uc or paddle-flex.")]


def convert(  # noqa: PLR0913 - typer makes an option of each
    source: Source,
    target: Target,
    made_as: As,
    kind: Kind = None,
    weights: Weights = None,
    dtype: Dtype = None,
    layout: Layout = None,
    program: Program = None,
    as_is: AsIs = False,
    assemble_flat: Flat = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint of one program to one of another, directory to directory.

    It is an import and an export in one: what is not understood is refused by name, SRC must not change meanwhile, and
    every byte is read back before DEST gets its name. If it is killed, the same command goes on from the files that are
    finished.
    """
    with console.reporting(as_json):
        text = None if program is None else program_text(program)
        wanted = {"as": made_as, "weights": weights, "dtype": dtype, "layout": layout, "program": text}
        how = {"kind": kind, "as_is": as_is, "assemble_flat": assemble_flat, "dry_run": dry_run}
        with console.told("converting", shown=not as_json) as on_bytes:
            words = [source, str(target), *options_of({**wanted, **how})]
            done = delegated.offline("convert", *words, on_bytes=on_bytes)
    if as_json:
        console.print_json(done)
        return
    if dry_run:
        _print_plan(done)
        return
    print_done("converted", target, done)


def _print_plan(done: dict[str, Any]) -> None:
    out = console.out()
    out.print(f"kind: {done['source']['kind']}")
    print_files(done["source"])
    made = console.table("FILE OF THE TARGET", "BYTES", right=("BYTES",))
    for file in done["written"]:
        made.add_row(Text(file["file"]), console.human_bytes(file["bytes"]))
    out.print(made)
    for one in (*done["notes"], *(f"left out: {left['what']}: {left['reason']}" for left in done["left_out"])):
        out.print(Text.assemble(("note  ", "bold"), one))
    size = console.human_bytes(int(done["bytes"]))
    what = f"{done['to']}: {done['tensors']} tensors, {size} in {done['files']} files; nothing was written"
    out.print(Text.assemble(("would convert  ", "yellow"), what))
