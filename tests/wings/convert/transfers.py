"""The jobs of the wings convert and merge over a root, called as the runner and the offline program call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from holdfast_formats.files import Files
from holdfast_formats.rest.jobs import ExportJob, ImportJob, JobRequest
from holdfast_formats.rest.operations import Job
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.progress import Progress
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.daemon.scrub import CheckJobs
from holdfast_service.storage import Tier
from holdfast_service.wings.convert import jobs as convert
from holdfast_service.wings.convert.export_jobs import Exporter
from holdfast_service.wings.convert.import_jobs import Importer
from holdfast_service.wings.merge import merge_jobs


class Transfers:
    """Jobs that may name directories below `place`; `trains` says whether ranks of a run are connected."""

    def __init__(
        self,
        control: Control,
        repairer: Repairer,
        place: Path | None = None,
        trains: Callable[[str], bool] = lambda run: False,
    ) -> None:
        checks = cast("CheckJobs", None)  # no job of these wings checks
        workers = Workers(control.catalog, control, checks, repairer, place, trains)
        self._kinds = convert.jobs(workers) | merge_jobs.jobs(workers)
        self._repairer = repairer
        self._importer, self._exporter = Importer(control), Exporter(control)

    def check(self, wanted: JobRequest) -> None:
        self._kinds[wanted.kind].check(wanted)

    def _do(self, job: Job, progress: Progress) -> dict[str, Any]:
        return self._kinds[job.kind].handler(job, cast("Any", progress))

    import_job = export_job = merge_job = _do

    def repair(self, run: str, step: int) -> dict[str, Any]:
        return self._repairer.restore(run, step)

    def bring(self, source: Files, wanted: ImportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        return self._importer.bring(source, wanted, progress, again)

    def export(self, place: Tier, wanted: ExportJob, progress: Progress, again: bool = False) -> dict[str, Any]:
        return self._exporter.export(place, wanted, progress, again)
