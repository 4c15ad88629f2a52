"""Exports a checkpoint for another program: `exports` plans its files, which are streamed and verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CorruptExtent, NoSpace, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.rest.jobs import ExportTerms
from holdfast_service.daemon.copying import streaming
from holdfast_service.daemon.copying.copies import CopyControl
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.storage import StagedDirectory, Tier, read_once
from holdfast_service.wings.convert.exports import kinds, ordered_tensors, plan
from holdfast_service.wings.convert.exports.plan import ExportOptions, ExportPlan
from holdfast_service.wings.convert.exports.source import ExportSource, of_committed
from holdfast_service.wings.convert.foreign import quantisation

NAMED_MAX = 200  # of what is left out, in a report
DEFAULT_WEIGHTS = "model"


def check_terms(terms: ExportTerms) -> None:
    """`InvalidRequest` for invalid options, before a checkpoint is read."""
    kinds.kind_named(terms.form or "")
    plan.weights_named(terms.weights or DEFAULT_WEIGHTS)
    if terms.dtype is not None:
        plan.dtype_named(terms.dtype)


class PlannedExport(NamedTuple):
    """A checkpoint, its source files, and the files to make."""

    source: ExportSource
    files: Files
    plan: ExportPlan
    kind: str

    @property
    def bytes(self) -> int:
        return self.plan.bytes

    @property
    def tensors(self) -> Mapping[TensorKey, ForeignTensor]:
        """All that the files are made of."""
        return {**self.source.listing.tensors, **self.plan.computed}


def plan_export(tier: Files, directory: str, manifest: Manifest, terms: ExportTerms) -> PlannedExport:
    """Plan the files of an export of the checkpoint in `directory`.

    Raises `InvalidRequest`, `NoSuchResource` and `StateMismatch` for what has no place in the target; and `Damaged`.
    """
    files = CommittedFiles(read_once(tier), manifest, directory)
    return planned_of(of_committed(files, manifest), files, terms)


def planned_of(source: ExportSource, files: Files, terms: ExportTerms) -> PlannedExport:
    """Plan the files of an export; `files` are those of the source. Raises as `plan_export`."""
    check_terms(terms)
    _check_quantised(source, terms)
    program = None if terms.program is None else ordered_tensors.compiled(source, terms.program)
    dtype = None if terms.dtype is None else plan.dtype_named(terms.dtype)
    options = ExportOptions(plan.weights_named(terms.weights or DEFAULT_WEIGHTS), dtype, terms.layout, program)
    kind = kinds.kind_named(terms.form or "")
    made = kind.plan(source, options)
    if not made.tensors and made.left_out:
        raise StateMismatch(
            f"nothing of the checkpoint can be exported as {kind.name}: {made.left_out[0].what}: {made.left_out[0].reason}",
            hint="choose another kind for --as, or leave it out to export the checkpoint as it is",
        )
    return PlannedExport(source, files, made, kind.name)


def _check_quantised(source: ExportSource, terms: ExportTerms) -> None:
    how = quantisation.method(ordered_tensors.config_of(source))
    if terms.dtype is not None:
        quantisation.refuse(how, "--dtype would round their scales", "leave --dtype out")
    if (terms.form or "").startswith("paddle"):
        quantisation.refuse(how, "Paddle does not read these codes", "use --as hf")


def write(planned: PlannedExport, place: Tier, target: StreamTarget, going: CopyControl) -> None:
    """Stage all files in `place`, durably, and verify them; continues an earlier start of the same work.

    Raises `NoSpace` before anything is written, `Damaged` for bytes of the checkpoint, or of the copy, that do not match
    their digest; `CopyStopped`; errors of both sides.
    """
    files, staging = planned.plan.files, target.staged.path
    written = sum(place.size(f"{staging}/{file.name}") or 0 for file in files)
    if planned.bytes - written > place.free_bytes():
        raise NoSpace(
            f"the export needs {planned.bytes} bytes, but only {place.free_bytes()} are free",
            hint="free some space, or export to another disk",
        )
    finished = streaming.stream(planned.files, planned.tensors, files, target, going)
    streaming.prove(place, staging, finished, going)
    place.sync_directory(staging)


def staged_at(place: Tier, staging: str) -> StreamTarget:
    """An export's staging directory in `place`, and the records beside it."""
    return StreamTarget(StagedDirectory(place, staging), place)


def stands(planned: PlannedExport, target: Tier, name: str, again: bool, going: CopyControl) -> bool:
    """Whether the directory `name` is this very export, made by a start that was killed before it reported success.

    The records list its files. If some are gone, or all are and it is done `again`, the files are computed once more, for
    their digests.
    """
    files = planned.plan.files
    if not all(target.size(f"{name}/{file.name}") == file.bytes for file in files):
        return False
    if set(target.list(name)) != {file.name.partition("/")[0] for file in files}:
        return False
    parent, _, leaf = name.rpartition("/")
    staging = f"{parent}/{naming.export_staging(leaf)}" if parent else naming.export_staging(leaf)
    tensors = planned.tensors
    finished = streaming.noted(planned.files, tensors, files, staged_at(target, staging))
    if len(finished) < len(files):
        if not finished and not again:
            return False
        finished = streaming.computed(planned.files, tensors, files, going)
    try:
        streaming.prove(target, name, finished, going)
    except CorruptExtent:
        return False
    return True


def report(planned: PlannedExport) -> dict[str, Any]:
    """The result, its differences from the checkpoint, and what is left out."""
    left = planned.plan.left_out
    result: dict[str, Any] = {
        "as": planned.kind,
        "files": len(planned.plan.files),
        "bytes": planned.bytes,
        "tensors": planned.plan.tensors,
        "committed": False,
        "notes": list(planned.plan.notes),
        "left_out": [one._asdict() for one in left[:NAMED_MAX]],
    }
    return {**result, "more_left_out": len(left) - NAMED_MAX} if len(left) > NAMED_MAX else result
