"""`holdfast show`: show one checkpoint."""

from __future__ import annotations

from rich.text import Text

from holdfast.read import ancestry
from holdfast.read.library import open_source, parse_target
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import HttpSource
from holdfast.rest import replicas
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Checkpoint, Root, Url
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.disk.thinning import USABLE_FOR
from holdfast_formats.rest import bodies


def show(checkpoint: Checkpoint, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show a checkpoint: origin, files and tensors."""
    with console.reporting(as_json), open_source(parse_target(checkpoint), root, url) as source:
        reader = CheckpointReader.open(source, complete=False)
        made, origin = reader.manifest, ancestry.origin_of(reader)
        copies, known = [], None
        if isinstance(source, HttpSource):
            copies = replicas.of(source.api, source.run, source.step)
            known = source.api.checkpoint(source.run, source.step)
        descent = None if origin is None else ancestry.Descent(source, origin)
        drawn = [] if descent is None else list(ancestry.lines(descent))
    if as_json:
        console.print_json({**_document(made, known), "replicas": [copy.model_dump() for copy in copies], "origin": origin})
        return
    out = console.out()
    out.print(Text(f"{made.run}@{made.step}", "bold"))
    mesh = " × ".join(f"{name} {size}" for name, size in made.mesh.items())
    facts = {
        "from": source.label,
        "created": f"{made.created} ({console.human_age(made.created)})",
        "written by": f"attempt {made.attempt}, {made.world} ranks" + (f", mesh {mesh}" if mesh else ""),
        "size": f"{console.human_bytes(made.bytes)} in {len(made.files)} files",
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in made.metrics.items()) or "none",
    }
    if made.thinned is not None:
        lost = f"without {', '.join(made.thinned.groups)}; it had {console.human_bytes(made.thinned.bytes)}"
        facts["thinned"] = f"{console.human_age(made.thinned.at)}: {lost}"
        facts["usable for"] = USABLE_FOR
    facts["checked"] = _checked(known)
    if copies:
        facts["replicas"] = ", ".join(f"{copy.tier} ({copy.state}, {console.human_age(copy.since)})" for copy in copies)
    for name, value in facts.items():
        out.print(Text(f"{name:<11} {value}"))
    for line in drawn:
        out.print(Text(line))
    _print_tables(made)


def _checked(known: bodies.CheckpointInfo | None) -> str:
    """The result of the service's restore check."""
    if known is None:
        return "known only to a service; run `holdfast verify` to verify it now"
    if known.checking is not None:
        read = f"{console.human_bytes(known.checking.done_bytes)} of {console.human_bytes(known.checking.total_bytes)}"
        return f"not checked yet since its commit: its nodes have read back {read}"
    if known.unchecked:
        return "not checked yet since its commit"
    age = "" if known.checked is None else f", {console.human_age(known.checked)}"
    if known.damage is not None:
        return f"damaged: {known.damage.get('detail', 'unknown')}{age}"
    tried = (known.check or {}).get("layouts")
    how = f"; restore tested in {'; '.join(tried)}" if tried else ""
    nodes = (known.check or {}).get("nodes")
    how = f"; read back by {nodes} nodes{how}" if nodes else how
    return ("sound, with new NaN or infinities" if known.healthy is False else "sound") + age + how


def _print_tables(made: Manifest) -> None:
    out = console.out()
    files = console.table("FILE", "BYTES", right=("BYTES",))
    for file in made.files:
        files.add_row(Text(file.name), console.human_bytes(file.bytes))
    columns = ("GROUP", "TENSOR", "DTYPE", "SHAPE", "BYTES", "PLACEMENT")
    tensors = console.table(*columns, right=("BYTES",), drop=("PLACEMENT", "GROUP", "DTYPE"))
    for group, held in made.tensors.items():
        for name, tensor in held.items():
            size = console.human_bytes(tensor.nbytes)
            tensors.add_row(group, Text(name), tensor.dtype, str(list(tensor.shape)), size, Text(tensor.placement))
        for alias, target in made.aliases.get(group, {}).items():
            tensors.add_row(group, Text(alias), "", "", "", Text(f"tied to {target}"))
    out.print()
    out.print(files)
    out.print()
    out.print(tensors, markup=False)


def _document(made: Manifest, known: bodies.CheckpointInfo | None) -> dict[str, object]:
    tensors = [
        {"group": group, "name": name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes, "file": t.file}
        for group, held in made.tensors.items()
        for name, t in held.items()
    ]
    files = [{"name": file.name, "bytes": file.bytes} for file in made.files]
    return {
        **(known or bodies.describe(made)).model_dump(),
        "mesh": made.mesh,
        "files": files,
        "tensors": tensors,
        "aliases": made.aliases,
    }
