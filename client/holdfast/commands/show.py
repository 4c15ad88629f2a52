"""`holdfast show`: show one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

from holdfast.read.checkpoint_index import ServiceIndex, open_library, open_source, parse_target
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast_formats import metric_values
from holdfast_formats.errors import NoSuchCheckpoint, NoSuchResource

if TYPE_CHECKING:
    from holdfast.read.checkpoint_root import CheckpointRoot
    from holdfast.read.sources import Source
    from holdfast.rest.api import Api
    from holdfast_formats.disk.manifests import Manifest
    from holdfast_formats.rest import bodies
    from holdfast_formats.rest.measurements import SaveTimes
    from holdfast_formats.rest.operations import Replica
    from holdfast_formats.rest.replica_lags import ReplicaLag
    from holdfast_formats.rest.runs import RunAbout

SAVES_MAX = 500  # among which the one of a checkpoint is looked for


def show(checkpoint: Checkpoint, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show a checkpoint: origin, files and tensors. RUN alone shows the stored facts of the run, and its newest
    checkpoint.
    """
    from holdfast.terminal import run_description as about

    with console.reporting(as_json):
        target = parse_target(checkpoint)
        metadata = (
            None
            if "@" in checkpoint or target.directory is not None or target.root is not None
            else _remembered(target.run, root, url)
        )
        if metadata is not None and not as_json:
            console.out().print(*about.lines(metadata), sep="\n")
        try:
            with open_source(target, root, url) as source:
                _show(source, metadata, as_json)
        except NoSuchCheckpoint:
            if metadata is None:
                raise
            if as_json:
                console.print_json({"run": metadata.run, "about": metadata})


def _remembered(run: str, root: CheckpointRoot | None, url: str | None) -> RunAbout | None:
    """The service's metadata of a run; None for a directory, and if there is none."""
    from holdfast.rest import runs

    with closing(open_library(root, url)) as library:
        if not isinstance(library, ServiceIndex):
            return None
        try:
            return runs.about(library.api, run)
        except NoSuchResource:  # an older service
            return None


def _show(source: Source, metadata: RunAbout | None, as_json: bool) -> None:
    from rich.text import Text

    from holdfast.read import ancestry
    from holdfast.read.reader import CheckpointReader
    from holdfast.read.sources import HttpSource
    from holdfast.rest import replicas
    from holdfast_formats.disk import coded
    from holdfast_formats.disk.thinning import EXACT_USABLE_FOR, SMALL_USABLE_FOR, USABLE_FOR
    from holdfast_formats.rest.replica_lags import told

    reader = CheckpointReader.open(source, complete=False)
    manifest, origin = reader.manifest, ancestry.origin_of(reader)
    copies, known, times = [], None, None
    lags: list[ReplicaLag] = []
    if isinstance(source, HttpSource):
        copies = replicas.of(source.api, source.run, source.step)
        known = source.api.checkpoint(source.run, source.step)
        times, lags = _times(source.api, known), _lags(source.api, known.run)
    descent = None if origin is None else ancestry.Descent(source, origin)
    drawn = [] if descent is None else list(ancestry.lines(descent))
    if as_json:
        document = {**_document(manifest, known), "replicas": copies, "lags": lags, "origin": origin, "measured": times}
        console.print_json(document if metadata is None else {**document, "about": metadata})
        return
    if metadata is not None:
        console.out().print()
    out = console.out()
    out.print(Text(f"{manifest.run}@{manifest.step}", "bold"))
    mesh = " × ".join(f"{name} {size}" for name, size in manifest.mesh.items())
    facts = {
        "from": source.label,
        "created": f"{manifest.created} ({console.human_age(manifest.created)})",
        "written by": f"attempt {manifest.attempt}, {manifest.world} rank{'s' if manifest.world != 1 else ''}"
        + (f", mesh {mesh}" if mesh else ""),
        "size": f"{console.human_bytes(manifest.bytes)} in {len(manifest.files)} files" + _shared(known, times),
        "metrics": ", ".join(f"{name} {metric_values.text(one)}" for name, one in manifest.all_metrics.items()) or "none",
    }
    if manifest.thinned is not None:
        lost = f"without {', '.join(manifest.thinned.groups)}; it had {console.human_bytes(manifest.thinned.bytes)}"
        facts["thinned"] = f"{console.human_age(manifest.thinned.at)}: {lost}"
        facts["usable for"] = USABLE_FOR
    if (small := manifest.compacted) is not None:
        facts["compact"] = f"{console.human_age(small.at)}: it had {console.human_bytes(small.bytes)}; {coded.told(small)}"
        facts["usable for"] = SMALL_USABLE_FOR if small.lossy else EXACT_USABLE_FOR
    facts["checked"] = _checked(known)
    facts |= _costs(times, copies)
    for name, value in facts.items():
        out.print(Text(f"{name:<11} {value}"))
    behind = [f"{'copied to':<11} {lag.replica}: {told(lag)}" for lag in lags]
    for line in (*behind, *drawn):
        out.print(Text(line))
    _print_tables(manifest)


def _shared(known: bodies.CheckpointInfo | None, times: SaveTimes | None) -> str:
    """What it has in common with older checkpoints, and what its save did not write for that reason."""
    shared = "" if known is None or not known.shared_bytes else f", {console.human_bytes(known.shared_bytes)} shared"
    linked = None if times is None else times.linked_bytes
    return shared + (f", {console.human_bytes(linked)} not written again by the save" if linked else "")


def _times(api: Api, known: bodies.CheckpointInfo) -> SaveTimes | None:
    """What was measured of the save that made it; None if it is not among the newest saves."""
    from holdfast_formats.rest.measurements import SaveTimes

    saves = islice(api.rounds(known.run, "committed"), SAVES_MAX)
    same = (one for one in saves if (one.step, one.attempt) == (known.step, known.attempt))
    found = next(same, None)
    return None if found is None else SaveTimes.model_validate(found.measured or {})


def _costs(times: SaveTimes | None, copies: Sequence[Replica]) -> dict[str, str]:
    """The copies, and what save, check and copies asked of buckets."""
    from holdfast_files.objects import costs

    asked = {"requests": "" if times is None else costs.of_save(times.model_dump())}
    asked["replicas"] = ", ".join(f"{copy.tier} ({copy.state}, {console.human_age(copy.since)})" for copy in copies)
    asked |= {f"to {copy.tier}": costs.of_copy(copy.measured) for copy in copies}
    return {name: said for name, said in asked.items() if said}


def _lags(api: Api, run: str) -> list[ReplicaLag]:
    """How far each replica is behind with this run."""
    from holdfast.rest.summaries import summary
    from holdfast_formats.rest.replica_lags import of_run

    copies = summary(api, run).copies
    return of_run(run, copies, [lag for node in api.nodes() for lag in node.lags]) if copies else []


def _checked(known: bodies.CheckpointInfo | None) -> str:
    """The result of the service's restore check."""
    if known is None:
        return "only a service records checks; verify now with `holdfast verify`"
    if known.checking is not None:
        read = f"{console.human_bytes(known.checking.done_bytes)} of {console.human_bytes(known.checking.total_bytes)}"
        return f"not checked yet since its commit: its nodes have verified {read} so far"
    if known.unchecked:
        return "not checked yet since its commit"
    age = "" if known.checked is None else f", {console.human_age(known.checked)}"
    if known.damage is not None:
        return f"damaged: {known.damage.get('detail', 'unknown')}{age}"
    tried = (known.check or {}).get("layouts")
    how = f"; restore tested in {'; '.join(tried)}" if tried else ""
    nodes = (known.check or {}).get("nodes")
    how = f"; verified by {nodes} nodes{how}" if nodes else how
    return ("sound, but with new NaN or infinities" if known.healthy is False else "sound") + age + how


def _print_tables(manifest: Manifest) -> None:
    from rich.text import Text

    from holdfast_formats.disk import coded

    out = console.out()
    files = console.table("FILE", "BYTES", right=("BYTES",))
    for file in manifest.files:
        files.add_row(Text(file.name), console.human_bytes(file.bytes))
    compact = manifest.compacted is not None
    columns = ("GROUP", "TENSOR", "DTYPE", "SHAPE", "BYTES", *(["STORED AS"] if compact else []), "PLACEMENT")
    tensors = console.table(*columns, right=("BYTES",), drop=("PLACEMENT", "GROUP", "DTYPE"))
    shown = coded.contents(manifest)
    for group, held in shown.tensors.items():
        for name, tensor in held.items():
            form = coded.stored_form(manifest, group, name)
            as_stored = Text("" if form is None else f"{form}, {console.human_bytes(form.bytes)}")
            kind = (tensor.dtype, str(list(tensor.shape)), console.human_bytes(tensor.nbytes))
            tensors.add_row(group, Text(name), *kind, *([as_stored] if compact else []), Text(tensor.placement))
        for alias, target in shown.aliases.get(group, {}).items():
            tensors.add_row(group, Text(alias), "", "", "", *([""] if compact else []), Text(f"tied to {target}"))
    out.print()
    out.print(files)
    out.print()
    out.print(tensors, markup=False)


def _document(manifest: Manifest, known: bodies.CheckpointInfo | None) -> dict[str, object]:
    from holdfast_formats.disk import coded
    from holdfast_formats.rest import bodies

    shown = coded.contents(manifest)
    tensors = [
        {
            "group": group,
            "name": name,
            "dtype": t.dtype,
            "shape": list(t.shape),
            "bytes": t.nbytes,
            **_stored(manifest, group, name),
        }
        for group, held in shown.tensors.items()
        for name, t in held.items()
    ]
    files = [{"name": file.name, "bytes": file.bytes} for file in manifest.files]
    return {
        **(known or bodies.describe(manifest)).model_dump(),
        "mesh": manifest.mesh,
        "files": files,
        "tensors": tensors,
        "aliases": shown.aliases,
    }


def _stored(manifest: Manifest, group: str, name: str) -> dict[str, object]:
    """Where a tensor is stored: its file, or the parts of a tensor stored in fewer bytes."""
    from holdfast_formats.disk import coded

    form = coded.stored_form(manifest, group, name)
    return {"file": manifest.tensors[group][name].file} if form is None else {"file": None, "stored": form._asdict()}
