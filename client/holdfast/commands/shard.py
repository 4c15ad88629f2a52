"""`holdfast restore --layout`: write the shard of one rank or of all ranks, or print the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from holdfast.checkpoint import Checkpoint
from holdfast.export import shard_file
from holdfast.layout import rules_choice, shards
from holdfast.memory import gc_pause
from holdfast.read.sources import Source
from holdfast.terminal import console
from holdfast_formats.disk.read_planner import ReadPlan
from holdfast_formats.errors import InvalidRequest, StorageFailed
from holdfast_formats.layout import language
from holdfast_formats.layout.language import Layout
from holdfast_formats.layout.rank_tensors import HeldTensors, LayoutHoldings
from holdfast_formats.programs import Program

PLANNED_TENSORS_MAX = 200_000  # of all ranks together: more are counted, and not made
_AXES_SHOWN = ("tp", "cp", "sharding", "dp", "pp", "etp", "ep")


class ShardRequest(NamedTuple):
    """Which shard to write; without a rank, those of all ranks."""

    layout: str
    rank: int | None
    group: str
    rules: Path | None
    program: Program | None = None


class Into(NamedTuple):
    out: Path | None
    all_ranks: Path | None
    plan: bool


class RankShare(NamedTuple):
    """What one rank holds and what must be read for it. For large worlds `held` and `plan` are not computed."""

    rank: int
    tensors: int
    bytes: int
    held: HeldTensors | None = None
    plan: ReadPlan | None = None


class Written(NamedTuple):
    rank: int
    out: Path
    bytes: int


def restore(source: Source, wanted: ShardRequest, into: Into, as_json: bool) -> None:
    """Write or print the ranks' shards; `InvalidRequest` if the options do not fit together."""
    if into.all_ranks is not None and (wanted.rank is not None or into.out is not None):
        raise InvalidRequest("--all-ranks cannot be combined with --rank or --out", hint="leave --rank and --out out")
    if into.out is not None and wanted.rank is None:
        raise InvalidRequest("--out needs a rank", hint="pass --rank N, or --all-ranks DIR instead")
    layout = rules_choice.layout_of(wanted.layout)
    ranks = range(layout.mesh.world) if wanted.rank is None else (wanted.rank,)
    with Checkpoint(source) as checkpoint:
        if into.plan or (into.out is None and into.all_ranks is None):
            shares = _shares(checkpoint, checkpoint.holding(layout, wanted.group, wanted.rules, wanted.program), ranks)
            if as_json:
                console.print_json(_document(layout, wanted, shares))
            else:
                _print(layout, wanted, shares)
        else:
            paths = {rank: into.out or _file_of(into.all_ranks or Path(), rank) for rank in ranks}
            _write(checkpoint, layout, wanted, paths, as_json)


def _name(wanted: ShardRequest) -> str:
    return "" if wanted.program is None else wanted.program.name


def _file_of(directory: Path, rank: int) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot create {directory}: {error.strerror}", hint="choose another directory") from error
    return directory / f"rank-{rank:05d}.safetensors"


def _shares(checkpoint: Checkpoint, holding: LayoutHoldings, ranks: Iterable[int]) -> list[RankShare]:
    with gc_pause.paused():
        shares = [RankShare(rank, *holding.share(rank)) for rank in ranks]
        if sum(share.tensors for share in shares) > PLANNED_TENSORS_MAX and len(shares) > 1:
            return shares
        helds = (holding.of(share.rank) for share in shares)
        return [
            share._replace(held=held, plan=checkpoint.plan(held.tensors, holding.group))
            for share, held in zip(shares, helds, strict=True)
        ]


def _write(checkpoint: Checkpoint, layout: Layout, wanted: ShardRequest, paths: Mapping[int, Path], as_json: bool) -> None:
    """Write all files, rank by rank. If one fails, those already written are removed."""
    contents, group = checkpoint.reader.contents, wanted.group
    holding = checkpoint.holding(layout, group, wanted.rules, wanted.program)
    total = sum(holding.share(rank).bytes for rank in paths)
    written: list[Written] = []
    notes: dict[str, None] = {}
    try:
        with console.progress("restoring", total, shown=not as_json) as bar:
            for rank, path in paths.items():
                held = holding.of(rank)
                file = shard_file.of(contents, layout, rank, group, held.tensors, _name(wanted))
                shard_file.write(checkpoint.reader, group, file, path, lambda count: bar.advance(bar.task_ids[0], count))
                written.append(Written(rank, path, file.bytes))
                notes |= dict.fromkeys(held.notes)
    except BaseException:
        for done in written:
            done.out.unlink(missing_ok=True)
        raise
    if as_json:
        files = [{"rank": done.rank, "out": str(done.out), "bytes": done.bytes} for done in written]
        console.print_json({**_document(layout, wanted, _shares(checkpoint, holding, paths)), "files": files})
        return
    for done in written:
        what = f"{done.out}: {console.human_bytes(done.bytes)}, rank {done.rank} of {language.text(layout)}"
        console.out().print(Text.assemble(("restored  ", "green"), what))
    _print_notes(notes)


def _print(layout: Layout, wanted: ShardRequest, shares: Sequence[RankShare]) -> None:
    axes = [axis for axis in _AXES_SHOWN if getattr(layout.mesh, axis) > 1]
    right = ("RANK", *(axis.upper() for axis in axes), "TENSORS", "BYTES", "TO READ")
    ranks = console.table(*right, right=right, drop=("TENSORS",))
    for share in shares:
        place = layout.mesh.coordinate(share.rank)
        to_read = console.human_bytes(share.plan.read) if share.plan is not None else "–"
        counts = (str(share.tensors), console.human_bytes(share.bytes), to_read)
        ranks.add_row(str(share.rank), *(str(getattr(place, axis)) for axis in axes), *counts)
    out = console.out()
    through = f", through {_name(wanted)}" if wanted.program is not None else ""
    out.print(Text(f"{language.text(layout)}, group {wanted.group}{through}", "bold"))
    out.print(ranks)
    if wanted.rank is not None and shares[0].held is not None:
        columns = ("TENSOR", "DTYPE", "SHAPE", "BYTES", "MADE OF")
        tensors = console.table(*columns, right=("BYTES",), drop=("DTYPE",), wrap=("MADE OF",))
        for local in shares[0].held.tensors:
            made_of = ", ".join(dict.fromkeys(part.tensor for part in local.parts if part.tensor != local.name))
            size = console.human_bytes(shards.nbytes(local))
            tensors.add_row(Text(local.name), local.dtype, str(list(local.shape)), size, Text(made_of))
        out.print()
        out.print(tensors, markup=False)
    _print_notes(note for share in shares if share.held is not None for note in share.held.notes)


def _print_notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        console.err().print(f"note: {note}", style="yellow", markup=False)


def _document(layout: Layout, wanted: ShardRequest, shares: Sequence[RankShare]) -> dict[str, Any]:
    return {
        "layout": language.text(layout),
        "group": wanted.group,
        **({"program": _name(wanted)} if wanted.program is not None else {}),
        "world": layout.mesh.world,
        "ranks": [_rank_document(layout, share) for share in shares],
    }


def _rank_document(layout: Layout, share: RankShare) -> dict[str, Any]:
    """One rank's entry in the JSON output; for large worlds only sizes."""
    place = {"rank": share.rank, "coordinates": layout.mesh.coordinate(share.rank)._asdict(), "bytes": share.bytes}
    if share.held is None or share.plan is None:
        return place
    return {
        **place,
        "bytes_needed": share.plan.needed,
        "bytes_read": share.plan.read,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "padding": t.padding} for t in share.held.tensors
        ],
        "notes": list(share.held.notes),
    }
