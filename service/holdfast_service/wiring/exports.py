"""Wires exports, from the request to the name: what is staged is read back before it gets its name."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted
from holdfast_service.control.checkpoints import commit
from holdfast_service.control.decisions import Decisions
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.copying import exporting, foreign_export, streaming
from holdfast_service.daemon.copying.copies import read_pair
from holdfast_service.daemon.copying.exporting import Export
from holdfast_service.daemon.copying.foreign_export import ExportTerms
from holdfast_service.storage import PosixTier, Readable, Tier
from holdfast_service.wiring.progress import Progress, going


class ForeignExport(NamedTuple):
    """A checkpoint to be exported on these terms, as the directory `target` of another tier."""

    run: str
    step: int
    target: str
    terms: ExportTerms


class Exporter:
    """Brings checkpoints of one root out of it."""

    def __init__(self, tier: Tier, decisions: Decisions) -> None:
        self._tier, self._decisions = tier, decisions

    def copy(self, place: PosixTier, wanted: Export, progress: Progress) -> dict[str, Any]:
        """Copy a checkpoint out; it gets its name only when it is complete."""
        with self._decisions.reading(wanted.run, wanted.step):
            size = read_pair(self._tier, naming.checkpoint_path(wanted.run, wanted.step)).made.bytes
            with place.alone(wanted.target):
                staging, made = exporting.stage(self._tier, place, wanted, going(progress, 2 * size))
                _publish(place, staging, wanted.target)
        return {"to": wanted.target, "files": len(made.files), "bytes": made.bytes, "committed": not wanted.model_only}

    def convert(self, place: PosixTier, wanted: ForeignExport, progress: Progress) -> dict[str, Any]:
        """Export for another program. A job that is interrupted goes on from the files that it had finished."""
        with self._decisions.reading(wanted.run, wanted.step):
            directory = naming.checkpoint_path(wanted.run, wanted.step)
            return converted(self._tier, directory, place, wanted.target, wanted.terms, progress)


def converted(
    tier: Readable, directory: str, place: PosixTier, target: str, terms: ExportTerms, progress: Progress
) -> dict[str, Any]:
    """Export the checkpoint in a directory of `tier` as the directory `target` of `place`; the report."""
    staging = exporting.place_for(place, target)
    planned = foreign_export.plan_export(tier, directory, read_pair(tier, directory).made, terms)
    with place.alone(target):  # two would write into one staging directory, and one publish what the other has not finished
        try:
            foreign_export.write(planned, place, staging, going(progress, 2 * planned.bytes))
        except Interrupted:
            raise  # the job goes on from what is staged
        except BaseException:
            streaming.discard(place, staging)
            raise
        _publish(place, staging, target)
        streaming.forget(place, staging)
    return {"to": target, **foreign_export.report(planned)}


def _publish(place: PosixTier, staging: str, target: str) -> None:
    try:
        commit.publish_export(place, staging, target)
    except AlreadyCommitted:
        streaming.discard(place, staging)
        raise
