"""Wires exports, from the request to the name: staged files are verified before the directory gets its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted
from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ExportJob, ExportTerms
from holdfast_service.control.checkpoints import commit
from holdfast_service.control.control import Control
from holdfast_service.control.jobs.runner import Interrupted
from holdfast_service.daemon.copying.progress import Progress, going
from holdfast_service.storage import Tier
from holdfast_service.wings.convert import converting, exporting, foreign_export
from holdfast_service.wings.convert.converting import Conversion
from holdfast_service.wings.convert.foreign_export import PlannedExport


class Exporter:
    """Brings checkpoints of one root out of it."""

    def __init__(self, control: Control) -> None:
        self._files, self._control = control.store.files, control

    def export(self, place: Tier, wanted: ExportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        """Copy a checkpoint out, or export it for another program; it gets its name only when it is complete.

        `again`: an earlier start of the service has begun the job.
        """
        export = self._copy if wanted.arguments.form is None else self._convert
        return export(place, wanted, progress, again)

    def _copy(self, place: Tier, wanted: ExportJob, progress: Progress, again: bool) -> dict[str, Any]:
        target = wanted.arguments.to
        with self._control.readers.reading(wanted.run, wanted.step):
            size = open_checkpoint(self._files, naming.checkpoint_path(wanted.run, wanted.step)).manifest.bytes
            ahead = going(progress, 2 * size)
            with exporting.alone(place, target) as staging:
                export = None
                if exporting.is_taken(place, target):
                    export = exporting.stands(self._files, place, wanted, ahead) if again else None
                    if export is None:
                        raise exporting.taken(target)
                if export is None:
                    export = exporting.stage(self._files, place, staging, wanted, ahead)
                    _publish(place, staging, target)
        committed = not wanted.arguments.model_only
        return {"to": target, "files": len(export.files), "bytes": export.bytes, "committed": committed}

    def _convert(self, place: Tier, wanted: ExportJob, progress: Progress, again: bool) -> dict[str, Any]:
        """Export for another program. An interrupted job reuses its finished files."""
        with self._control.readers.reading(wanted.run, wanted.step):
            work = ExportWork(place, wanted.arguments.to, progress, again)
            return converted(self._files, naming.checkpoint_path(wanted.run, wanted.step), wanted.arguments, work)


class ExportWork(NamedTuple):
    """Where an export is written, as the directory `target` of `place`, and its progress callback.

    `again`: an earlier process began the work, and may have been killed after it was done.
    """

    place: Tier
    target: str
    progress: Progress
    again: bool = False


def converted(files: Files, directory: str, terms: ExportTerms, work: ExportWork) -> dict[str, Any]:
    """Export the checkpoint in a directory of `files`; the report."""
    planned = foreign_export.plan_export(files, directory, open_checkpoint(files, directory).manifest, terms)
    _written(planned, work, lambda: None)
    return {"to": work.target, **foreign_export.report(planned)}


def convert(conversion: Conversion, work: ExportWork) -> dict[str, Any]:
    """Write a conversion; the report. `StateMismatch` for a source that changes meanwhile."""
    _written(conversion.export, work, conversion.check_unchanged)
    return {"to": work.target, **converting.report(conversion)}


def _written(planned: PlannedExport, work: ExportWork, check_source: Callable[[], None]) -> None:
    """Stage the files, verify them, and give them their name; resumes an interrupted start of the same work."""
    place, ahead = work.place, going(work.progress, 2 * planned.bytes)
    with exporting.alone(place, work.target) as staging:
        target = foreign_export.staged_at(place, staging)
        if exporting.is_taken(place, work.target):
            if not foreign_export.stands(planned, place, work.target, work.again, ahead):
                raise exporting.taken(work.target)
            target.forget()  # a killed start had done it all, but for saying so
            return
        try:
            foreign_export.write(planned, place, target, ahead)
            check_source()
        except Interrupted:
            raise  # the job goes on from what is staged
        except BaseException:
            target.discard()
            raise
        _publish(place, staging, work.target)
        target.forget()


def _publish(place: Tier, staging: str, target: str) -> None:
    try:
        commit.publish_export(place, staging, target)
    except AlreadyCommitted:
        foreign_export.staged_at(place, staging).discard()
        raise
