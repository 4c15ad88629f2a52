"""`holdfast programs`: list mapping programs, show one, and check one against a checkpoint, as a dry run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from holdfast.checkpoint import Checkpoint
from holdfast.export.tensor_headers import headers
from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.read.checkpoint_root import CheckpointRoot
from holdfast.terminal import console
from holdfast.terminal.options import SELECTED, AsJson, Root, Url
from holdfast.terminal.program_files import program_text
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.programs import (
    CompiledProgram,
    Program,
    Ranks,
    compile_program,
    inverted,
    load,
    packaged,
    read_program,
)
from holdfast_formats.programs.choice import written
from holdfast_formats.tensors import TensorSpec

SHOWN_MAX = 40  # rows of a group that people see; --json prints all
CONFIG = "config.json"

app = typer.Typer(
    help="Show and check mapping programs. A program maps tensors with the names of one framework to those of another.",
    no_args_is_help=True,
)
Which = Annotated[str, typer.Argument(metavar="PROGRAM", help="A program's name, or its TOML file.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The model's config.json.")]
On = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="CHECKPOINT", help=f"{SELECTED}, or a directory with safetensors files."),
]
Inverse = Annotated[bool, typer.Option("--inverse", help="Check the inverse program instead.")]
SourceRanks = Annotated[
    int,
    typer.Option("--source-ranks", metavar="N", help="Number of ranks over which the source shards fused tensors.", min=1),
]
TargetRanks = Annotated[
    int,
    typer.Option("--target-ranks", metavar="N", help="Number of ranks over which the target shards fused tensors.", min=1),
]


class Tried(NamedTuple):
    """A checkpoint's tensors, and the config.json beside them."""

    label: str
    specs: Mapping[TensorKey, TensorSpec]
    config: Mapping[str, Any]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the programs that come with Holdfast."""
    with console.reporting(as_json):
        programs = [load(name) for name in packaged()]
        if as_json:
            console.print_json([_facts(program) for program in programs])
            return
        table = console.table("PROGRAM", "FROM", "TO", "MODEL TYPES", wrap=("FROM", "TO", "MODEL TYPES"))
        for program in programs:
            table.add_row(program.name, program.source, program.target, ", ".join(program.model_types))
        console.out().print(table, markup=False)


@app.command()
def show(program: Which, as_json: AsJson = False) -> None:
    """Print a program's file, to read it or to start your own program from it."""
    with console.reporting(as_json):
        text = _text(program)
        read_program(text)
        if as_json:
            console.print_json({**_facts(read_program(text)), "text": text})
        else:
            console.out().print(text, markup=False, highlight=False, soft_wrap=True, end="")


@app.command()
def check(  # noqa: PLR0913 — one an option
    program: Which,
    config: Config = None,
    checkpoint: On = None,
    inverse: Inverse = False,
    source_ranks: SourceRanks = 1,
    target_ranks: TargetRanks = 1,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check a program: alone, or with a checkpoint, and print how tensors would be mapped. Nothing is written."""
    with console.reporting(as_json):
        made = read_program(_text(program))
        back = _way_back(made)
        if inverse:
            made = inverted(made)
        if checkpoint is None:
            _print_program(made, back, as_json)
            return
        tried = _tried(checkpoint, config, root, url)
        compiled = compile_program(made, tried.specs, tried.config, ranks=Ranks(source_ranks, target_ranks))
        if back is None and not inverse:
            _check_back(made, compiled, tried, Ranks(target_ranks, source_ranks))
        console.answer(_document(made, back, compiled, tried), lambda: _print_compiled(made, back, compiled, tried), as_json)


def _text(program: str) -> str:
    """The text of a program: a file, or a shipped one."""
    text = program_text(program)
    return written(text) if text == program else text


def _facts(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "from": program.source,
        "to": program.target,
        "model_types": list(program.model_types),
        "about": program.about,
        "inverse": _way_back(program) is None,
    }


def _way_back(program: Program) -> str | None:
    """The reason why a program has no inverse; None if it has one."""
    try:
        inverted(program)
    except InvalidRequest as problem:
        return f"{problem.detail}; {problem.hint}"
    return None


def _tried(checkpoint: str, config: Path | None, root: CheckpointRoot | None, url: str | None) -> Tried:
    target = parse_target(checkpoint)
    if target.directory is not None and not (target.directory / naming.MANIFEST).is_file():
        return Tried(checkpoint, headers(target.directory), _config(config or target.directory / CONFIG, config is not None))
    with open_source(target, root, url) as source, Checkpoint(source) as held:
        specs = {
            TensorKey(group, name): TensorSpec(group, name, info.dtype, info.shape)
            for group, tensors in held.tensors.items()
            for name, info in tensors.items()
        }
        return Tried(source.label, specs, (held.config or {}) if config is None else _config(config, True))


def _config(path: Path, needed: bool) -> Mapping[str, Any]:
    if not path.is_file():
        if needed:
            raise NoSuchResource(
                f"the file {path} does not exist", hint="pass the path of the model's config.json as --config"
            )
        return {}
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise InvalidRequest(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"{path} is not a JSON object", hint="pass the path of the model's config.json as --config")
    return document


def _check_back(program: Program, compiled: CompiledProgram, tried: Tried, ranks: Ranks) -> None:
    """Check that the inverse restores exactly these tensors, except for stated losses."""
    specs = {key: mapped.spec for key, mapped in compiled.tensors.items()}
    back = compile_program(inverted(program), specs, tried.config, ranks=ranks)
    lost = {loss.key for loss in compiled.lost}
    for key, spec in tried.specs.items():
        again = back.tensors.get(key)
        if key not in lost and (again is None or again.spec.shape != spec.shape):
            raise StateMismatch(f"the inverse does not reproduce {key.name!r}", tensor=key.name)


def _document(program: Program, back: str | None, compiled: CompiledProgram, tried: Tried) -> dict[str, Any]:
    rows = compiled.rows(tried.specs)
    return {
        "program": program.name,
        "from": program.source,
        "to": program.target,
        "checkpoint": tried.label,
        "no_inverse": back,
        "tensors": [
            {
                "group": row.made.group,
                "name": row.made.name,
                "dtype": row.made.dtype,
                "shape": list(row.made.shape),
                "how": row.how,
                "of": [key.name for key in row.sources],
            }
            for row in rows
        ],
        "lost": [
            {"group": one.key.group, "name": one.key.name, "elements": one.elements, "why": one.why} for one in compiled.lost
        ],
        "added": [{"group": key.group, "name": key.name} for key in compiled.added],
        "casts": [
            {"name": one.key.name, "before": one.before, "after": one.after, "lossless": one.lossless}
            for one in compiled.casts
        ],
        "equal": [[key.name for key in keys] for keys in compiled.equal],
        "zeros": [key.name for key in compiled.zeros],
        "notes": list(compiled.notes),
    }


def _print_program(program: Program, back: str | None, as_json: bool) -> None:
    if as_json:
        console.print_json({"program": program.name, "statements": len(program.statements), "no_inverse": back})
        return
    out = console.out()
    out.print(
        f"{program.name}: {len(program.statements)} statements, from {program.source} to {program.target}", markup=False
    )
    out.print(f"Inverse: {'derived or written' if back is None else back}", markup=False)
    out.print("Pass --checkpoint to see how tensors are mapped.", markup=False)


def _print_compiled(program: Program, back: str | None, compiled: CompiledProgram, tried: Tried) -> None:
    out, rows = console.out(), compiled.rows(tried.specs)
    for group in dict.fromkeys(row.made.group for row in rows):
        held = [row for row in rows if row.made.group == group]
        table = console.table(group.upper(), "DTYPE", "SHAPE", "HOW", "OF", drop=("DTYPE",), wrap=("HOW", "OF"))
        for row in held[:SHOWN_MAX]:
            names = [key.name for key in row.sources]
            of = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            table.add_row(row.made.name, row.made.dtype, "×".join(map(str, row.made.shape)) or "scalar", row.how, of)
        out.print(table, markup=False)
        if len(held) > SHOWN_MAX:
            out.print(f"… and {len(held) - SHOWN_MAX} more of group {group}; --json prints all", markup=False)
    for loss in compiled.lost:
        out.print(Text(f"lost: {loss.elements} elements of {loss.key.name} ({loss.key.group}), {loss.why}", "yellow"))
    for cast in compiled.casts:
        exact = "lossless" if cast.lossless else "rounds"
        out.print(f"cast: {cast.key.name} from {cast.before} to {cast.after}, which is {exact}", markup=False)
    for note in compiled.notes:
        out.print(f"note: {note}", markup=False)
    count = f"{len(tried.specs)} tensors of {tried.label} become {len(compiled.tensors)}"
    way = "the inverse reproduces the same tensors" if back is None else f"no inverse: {back}"
    out.print(f"{program.name}: {count}; {way}.", markup=False)
