"""What `holdfast restore --layout` does: a rank's shard in a file, every rank's in a directory, or what they would hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from holdfast import console, rulebook, shard_file, shards
from holdfast.checkpoint import Checkpoint
from holdfast.sources import Source
from holdfast_formats import layouts
from holdfast_formats.errors import InvalidRequest, StorageFailed
from holdfast_formats.holding import Held
from holdfast_formats.layouts import Layout
from holdfast_formats.reading import ReadPlan

_AXES_SHOWN = ("tp", "cp", "sharding", "dp", "pp", "etp", "ep")


class Wanted(NamedTuple):
    """Whose shard of what; every rank's where no rank is named."""

    layout: str
    rank: int | None
    group: str
    rules: Path | None


class Into(NamedTuple):
    """Where it goes. `plan`, or neither path: nowhere, it is only said."""

    out: Path | None
    all_ranks: Path | None
    plan: bool


class Share(NamedTuple):
    """What one rank holds, and what has to be read for it."""

    rank: int
    held: Held
    bytes: int
    plan: ReadPlan


def restore(source: Source, wanted: Wanted, into: Into, as_json: bool) -> None:
    """Write or print what ranks hold; `InvalidRequest` where the options do not fit together."""
    if into.all_ranks is not None and (wanted.rank is not None or into.out is not None):
        raise InvalidRequest("--all-ranks is for every rank's file", hint="leave --rank and --out out")
    if into.out is not None and wanted.rank is None:
        raise InvalidRequest(
            "nothing says whose shard the file shall hold", hint="give --rank N, or --all-ranks DIR instead"
        )
    layout = rulebook.layout_of(wanted.layout)
    ranks = range(layout.mesh.world) if wanted.rank is None else (wanted.rank,)
    with Checkpoint(source) as checkpoint:
        if into.plan or (into.out is None and into.all_ranks is None):
            shares = _shares(checkpoint, layout, wanted, ranks)
            if as_json:
                console.print_json(_document(layout, wanted, shares))
            else:
                _print(layout, wanted, shares)
        else:
            paths = {rank: into.out or _file_of(into.all_ranks or Path(), rank) for rank in ranks}
            _write(checkpoint, layout, wanted, paths, as_json)


def _file_of(directory: Path, rank: int) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be made: {error.strerror}", hint="choose another directory") from error
    return directory / f"rank-{rank:05d}.safetensors"


def _shares(checkpoint: Checkpoint, layout: Layout, wanted: Wanted, ranks: Iterable[int]) -> list[Share]:
    holding = checkpoint.holding(layout, wanted.group, wanted.rules)
    shares = []
    for rank in ranks:
        held = holding.of(rank)
        size = sum(shards.nbytes(local) for local in held.tensors)
        shares.append(Share(rank, held, size, checkpoint.plan(held.tensors, wanted.group)))
    return shares


def _write(checkpoint: Checkpoint, layout: Layout, wanted: Wanted, paths: Mapping[int, Path], as_json: bool) -> None:
    """All files, or none: what was written is removed where a later one fails."""
    shares = _shares(checkpoint, layout, wanted, paths)
    manifest, group = checkpoint.manifest, wanted.group
    files = [
        shard_file.lay_out(share.held.tensors, shard_file.describe(manifest, layout, share.rank, group)) for share in shares
    ]
    written: list[Path] = []
    try:
        with console.progress("restoring", sum(file.bytes for file in files), shown=not as_json) as bar:
            for path, file in zip(paths.values(), files, strict=True):
                shard_file.write(
                    checkpoint.reader, wanted.group, file, path, lambda count: bar.advance(bar.task_ids[0], count)
                )
                written.append(path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    if as_json:
        listed = [{"rank": s.rank, "out": str(p), "bytes": f.bytes} for s, p, f in zip(shares, written, files, strict=True)]
        console.print_json({**_document(layout, wanted, shares), "files": listed})
        return
    for share, path, file in zip(shares, written, files, strict=True):
        what = f"{path}: {console.human_bytes(file.bytes)}, rank {share.rank} of {layouts.text(layout)}"
        console.out().print(Text.assemble(("restored  ", "green"), what))
    _print_notes(shares)


def _print(layout: Layout, wanted: Wanted, shares: Sequence[Share]) -> None:
    axes = [axis for axis in _AXES_SHOWN if getattr(layout.mesh, axis) > 1]
    right = ("RANK", *(axis.upper() for axis in axes), "TENSORS", "BYTES", "TO READ")
    ranks = console.table(*right, right=right)
    for share in shares:
        place = layout.mesh.coordinate(share.rank)
        counts = (str(len(share.held.tensors)), console.human_bytes(share.bytes), console.human_bytes(share.plan.read))
        ranks.add_row(str(share.rank), *(str(getattr(place, axis)) for axis in axes), *counts)
    out = console.out()
    out.print(Text(f"{layouts.text(layout)}, group {wanted.group}", "bold"))
    out.print(ranks)
    if wanted.rank is not None:
        tensors = console.table("TENSOR", "DTYPE", "SHAPE", "BYTES", "MADE OF", right=("BYTES",))
        for local in shares[0].held.tensors:
            made_of = ", ".join(dict.fromkeys(part.tensor for part in local.parts if part.tensor != local.name))
            size = console.human_bytes(shards.nbytes(local))
            tensors.add_row(Text(local.name), local.dtype, str(list(local.shape)), size, Text(made_of))
        out.print()
        out.print(tensors, markup=False)
    _print_notes(shares)


def _print_notes(shares: Sequence[Share]) -> None:
    for note in dict.fromkeys(note for share in shares for note in share.held.notes):
        console.err().print(f"note: {note}", style="yellow", markup=False)


def _document(layout: Layout, wanted: Wanted, shares: Sequence[Share]) -> dict[str, Any]:
    return {
        "layout": layouts.text(layout),
        "group": wanted.group,
        "world": layout.mesh.world,
        "ranks": [
            {
                "rank": share.rank,
                "coordinates": layout.mesh.coordinate(share.rank)._asdict(),
                "bytes": share.bytes,
                "bytes_needed": share.plan.needed,
                "bytes_read": share.plan.read,
                "tensors": [
                    {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "padding": t.padding}
                    for t in share.held.tensors
                ],
                "notes": list(share.held.notes),
            }
            for share in shares
        ],
    }
