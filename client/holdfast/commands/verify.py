"""`holdfast verify`: check every byte against its digest."""

from __future__ import annotations

import typer
from rich.text import Text

from holdfast.read.library import open_source, parse_target
from holdfast.read.reader import CheckpointReader, Damage
from holdfast.read.sources import DirectorySource, Source
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast_formats import naming
from holdfast_formats.errors import EXIT_STATUS, CorruptManifest, Damaged, NoSuchCheckpoint, NotCommitted


def verify(checkpoint: Checkpoint, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Read a checkpoint back and check every byte of every file. Exit status 5: damaged; 3: not a checkpoint."""
    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        checked, damages = _verify(source, shown=not as_json)
    if as_json:
        print_damages = [damage._asdict() for damage in damages]
        console.print_json({"from": source.label, "bytes": checked, "intact": not damages, "damages": print_damages})
    else:
        _print(source, checked, damages)
    if damages:
        raise typer.Exit(EXIT_STATUS[Damaged])


def _verify(source: Source, shown: bool) -> tuple[int, list[Damage]]:
    try:
        reader = CheckpointReader.open(source, complete=False)
    except (NotCommitted, CorruptManifest) as error:
        if isinstance(error, NotCommitted) and isinstance(source, DirectorySource) and source.size(naming.MANIFEST) is None:
            raise NoSuchCheckpoint(
                f"{source.label} is not a checkpoint: it has neither {naming.COMMIT} nor {naming.MANIFEST}",
                hint="`holdfast ls` lists checkpoints, and `holdfast import` creates one from a Hugging Face "
                "directory; if this is an interrupted copy or export, delete it and start it again",
            ) from error
        return 0, [Damage(str(error.members.get("file", source.label)), None, 0, 0, error.detail)]
    total = reader.manifest.bytes
    with console.progress("verifying", total, shown) as bar:
        return total, reader.verify(lambda count: bar.advance(bar.task_ids[0], count))


def _print(source: Source, checked: int, damages: list[Damage]) -> None:
    out = console.out()
    if not damages:
        out.print(
            Text.assemble(("intact  ", "green"), f"{source.label}: {console.human_bytes(checked)} match their digests")
        )
        return
    out.print(Text.assemble(("damaged  ", "bold red"), f"{source.label}: {len(damages)} findings"))
    numbers = ("BYTES FROM", "LENGTH")
    table = console.table("FILE", "TENSOR", *numbers, "WHAT", right=numbers, drop=("LENGTH",), wrap=("WHAT",))
    for damage in damages:
        table.add_row(
            Text(damage.file), Text(damage.tensor or "-"), str(damage.offset), str(damage.length), Text(damage.what)
        )
    out.print(table)
