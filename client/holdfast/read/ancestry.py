"""The ancestry of a checkpoint in its state.json: what it was merged from, through all generations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import Source
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import COMMIT_BYTES_MAX
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import CheckpointId

GENERATIONS_MAX = 8
LEFT_OUT_SHOWN = 20
_INDENT = "  "

Origin = Mapping[str, Any]


class Descent(NamedTuple):
    """A checkpoint that was made of others: its place, and its state.json's origin."""

    source: Source
    origin: Origin


def origin_of(reader: CheckpointReader) -> Origin | None:
    """The origin in a state.json; None for a checkpoint that a training saved."""
    if reader.manifest.file(naming.STATE) is None:
        return None
    return state_json.source_of(reader.read_file(naming.STATE))


def lines(descent: Descent) -> Iterator[str]:
    """The ancestry, a line each: how it was made, then indented its sources, if they still exist."""
    yield from _lines(descent.source, descent.origin, 0)


def _lines(source: Source, origin: Origin, generation: int) -> Iterator[str]:
    indent = _INDENT * generation
    if origin.get("kind") != "merge":
        yield f"{indent}imported    from {origin.get('kind')}, {len(origin.get('files', ()))} files"
        left = origin.get("left_out", ())
        yield from (f"{indent}left out    {part.get('what')}: {part.get('reason')}" for part in left[:LEFT_OUT_SHOWN])
        if len(left) > LEFT_OUT_SHOWN:
            yield f"{indent}            and {len(left) - LEFT_OUT_SHOWN} more; --json lists them"
        return
    yield f"{indent}merged      by {origin.get('method')}, {origin.get('dialect')} dialect, seed {origin.get('seed')}, of"
    for model in origin.get("models", ()):
        yield f"{indent}{_INDENT}{_said(model)}"
        yield from _parents(source, model, generation + 2)


def _said(model: Mapping[str, Any]) -> str:
    if "commit" in model:
        return f"{model.get('model')}  (COMMIT {model['commit']})"
    return f"{model.get('model')}  ({model.get('kind')})"


def _parents(source: Source, model: Mapping[str, Any], generation: int) -> Iterator[str]:
    """The ancestry of a model, if it is a checkpoint of the same root, and still the one that was merged."""
    indent = _INDENT * generation
    if "commit" not in model or generation > 2 * GENERATIONS_MAX:
        return
    try:
        which = CheckpointId(naming.check_run(str(model["run"])), naming.check_step(model["step"]))
        with source.beside(which.run, which.step) as parent:
            if parent is None:
                return
            if digest(parent.read(naming.COMMIT, 0, COMMIT_BYTES_MAX)) != model["commit"]:
                yield f"{indent}replaced by another checkpoint since the merge"
                return
            origin = origin_of(CheckpointReader.open(parent, complete=False))
            if origin is not None:
                yield from _lines(parent, origin, generation)
    except (CheckpointError, KeyError):
        yield f"{indent}no longer exists"
