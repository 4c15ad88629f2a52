"""`holdfast verify`: check every byte against its digest."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import typer

from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast_formats import naming
from holdfast_formats.errors import EXIT_STATUS, CorruptManifest, Damaged, NoSuchCheckpoint, NotCommitted

if TYPE_CHECKING:
    from holdfast.read.reader import Damage
    from holdfast.read.sources import Source
    from holdfast_formats.rest.operations import Event

EVENTS_MAX = 500  # looked through for repairs
REPAIRS_SHOWN = 5


def verify(checkpoint: Checkpoint, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Read a checkpoint back and check every byte of every file. Exit status 5: damaged; 3: not a checkpoint."""
    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        checked, damages = _verify(source, shown=not as_json)
        repairs = [] if damages else _repairs(source)
    if as_json:
        rows = [damage._asdict() for damage in damages]
        summary = {"from": source.label, "bytes": checked, "intact": not damages, "damages": rows}
        more = {"hint": _next(source)} if damages else {"repaired": repairs}
        console.print_json({**summary, **more})
    elif damages:
        _print_damages(source, damages)
    else:
        _print_sound(source, checked, repairs)
    if damages:
        raise typer.Exit(EXIT_STATUS[Damaged])


def _verify(source: Source, shown: bool) -> tuple[int, list[Damage]]:
    from holdfast.read.reader import CheckpointReader, Damage
    from holdfast.read.sources import DirectorySource

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


def _repairs(source: Source) -> list[Event]:
    """The service's repairs of this checkpoint, newest first, after damage found by a check or a reader."""
    from holdfast.read.sources import HttpSource
    from holdfast_formats.rest.operations import Event

    if not isinstance(source, HttpSource):
        return []
    asked = {"run": source.run, "kind": "checkpoint-repaired"}
    events = islice(source.api.pages("/v1/events", Event, asked), EVENTS_MAX)
    return [event for event in events if event.step == source.step and "replica" not in event.detail]


def _print_sound(source: Source, checked: int, repairs: list[Event]) -> None:
    from rich.text import Text

    out = console.out()
    word = ("repaired  ", "yellow") if repairs else ("intact  ", "green")
    out.print(Text.assemble(word, f"{source.label}: {console.human_bytes(checked)} match their digests"))
    for event in repairs[:REPAIRS_SHOWN]:
        out.print(Text(f"at {event.at[:19]}: {event.text}"))


def _print_damages(source: Source, damages: list[Damage]) -> None:
    from rich.text import Text

    out = console.out()
    out.print(Text.assemble(("damaged  ", "bold red"), f"{source.label}: {len(damages)} findings"))
    numbers = ("BYTES FROM", "LENGTH")
    table = console.table("FILE", "TENSOR", *numbers, "WHAT", right=numbers, drop=("LENGTH",), wrap=("WHAT",))
    for damage in damages:
        table.add_row(
            Text(damage.file), Text(damage.tensor or "-"), str(damage.offset), str(damage.length), Text(damage.what)
        )
    out.print(table)
    out.print(Text(_next(source)))


def _next(source: Source) -> str:
    from holdfast.read.sources import HttpSource

    if isinstance(source, HttpSource):
        other = f"without a replica, restore another step (`holdfast ls {source.run}`)"
        return f"`holdfast repair {source.run}@{source.step}` repairs it from a replica; {other}"
    return (
        "if it is in a root, `holdfast repair RUN@STEP --root ROOT --from DIR` repairs it from a replica; "
        "if it is a copy or an export, make it again from its checkpoint"
    )
