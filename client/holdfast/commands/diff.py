"""`holdfast diff`: compare two checkpoints tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from holdfast.read.checkpoint_index import open_source, parse_target
from holdfast.terminal import completion, console
from holdfast.terminal.options import SELECTED, AsJson, Root, Url

if TYPE_CHECKING:
    from holdfast.read.reader import CheckpointReader
    from holdfast_files.comparing import ComparedFiles
    from holdfast_formats.rest import comparing
    from holdfast_formats.rest.comparing import Octets, Pair
    from holdfast_formats.rest.measurements import Difference

SHOWN_MAX = 30
DECODED_ELEMENTS = 2**20  # at once, of a tensor that is stored in fewer bytes

_A = typer.Argument(metavar="A", help=f"A checkpoint: {SELECTED}, or its directory.", autocompletion=completion.checkpoints)
_B = typer.Argument(
    metavar="B",
    help="The other checkpoint; a plain number is a step of the same run.",
    autocompletion=completion.checkpoints,
)
A = Annotated[str, _A]
B = Annotated[str, _B]
Group = Annotated[str | None, typer.Option("--group", metavar="GROUP", help="Only this group.")]
Fast = Annotated[bool, typer.Option("--fast", help="Compare digests only: shows what differs, but not by how much.")]
Sort = Annotated[Literal["relative", "change", "name"], typer.Option("--sort", help="Sort order.")]
Most = Annotated[int, typer.Option("--most", metavar="N", min=1, help="Number of tensors to show; --json prints all.")]


def diff(  # noqa: PLR0913 — a command's options
    a: A,
    b: B,
    group: Group = None,
    fast: Fast = False,
    sort: Sort = "relative",
    most: Most = SHOWN_MAX,
    root: Root = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints. It lists which tensors are equal, missing or reshaped, and how much the others differ.

    Every byte is verified before it is compared. Exit status 0 whether they are equal or not.
    """
    from holdfast.read.reader import CheckpointReader
    from holdfast_formats.rest import comparing

    other = f"{a.partition('@')[0]}@{b}" if b.isascii() and b.isdigit() and "@" in a else b
    with console.reporting(as_json), open_source(parse_target(a), root, url) as left_source:
        left = CheckpointReader.open(left_source, complete=False)
        with open_source(parse_target(other), root, url) as right_source:
            right = CheckpointReader.open(right_source, complete=False)
            pairs = comparing.pairs(left.contents, right.contents, group)
            differences = [comparing.difference(pair) for pair in pairs] if fast else _exact(left, right, pairs, not as_json)
    total = comparing.summarise(differences)
    labels = [f"{reader.manifest.run}@{reader.manifest.step}" for reader in (left, right)]
    if as_json:
        summary = {"a": labels[0], "b": labels[1], "exact": not fast, **total._asdict()}
        console.print_json({**summary, "items": differences})
    else:
        _print(labels, differences, total, sort, most)


def _exact(left: CheckpointReader, right: CheckpointReader, pairs: list[Pair], shown: bool) -> list[Difference]:
    from holdfast_files.comparing import bytes_to_read, compare

    def advance(count: int) -> None:
        bar.advance(bar.task_ids[0], count)

    with console.progress("comparing", bytes_to_read(pairs), shown) as bar:
        return list(compare(_side(left), _side(right), pairs, advance, left.cores))


def _side(reader: CheckpointReader) -> ComparedFiles:
    import numpy as np

    from holdfast_files.comparing import ComparedFiles
    from holdfast_formats.disk import codings
    from holdfast_formats.region import whole

    def decoded(pair: Pair) -> Iterator[Octets]:
        for box in codings.slabs(whole(pair.entry.shape), DECODED_ELEMENTS):
            yield reader.read(pair.group, pair.name, box).reshape(-1).view(np.uint8)

    return ComparedFiles(reader.source, "", decoded)


def _print(labels: list[str], differences: list[Difference], total: comparing.Summary, sort: Sort, most: int) -> None:
    from rich.text import Text

    from holdfast_formats.rest import comparing, lists

    out = console.out()
    states = ", ".join(f"{count} {state.replace('-', ' ')}" for state, count in sorted(total.tensors.items()))
    apart = "" if total.relative is None else f"; relative change of the changed tensors: {total.relative:.3g}"
    sick = f"; {total.nonfinite} with NaN or infinite values" if total.nonfinite else ""
    out.print(Text(f"{labels[0]} and {labels[1]}: {states or 'no tensors'}{sick}{apart}", "bold"))
    rows = [one for one in differences if one.state != "equal"]

    def place(one: Difference) -> tuple[int, int, float]:
        value = None if sort == "name" else getattr(one, sort)
        return comparing.largest_first(one, value, comparing.has_nonfinite(one))

    rows.sort(key=place)  # stable
    if not rows:
        return
    out.print(console.table_of(lists.DIFFERENCES, rows[:most]))
    if len(rows) > most:
        out.print(Text(f"and {len(rows) - most} more: raise --most, or use --json for all", "dim"))
