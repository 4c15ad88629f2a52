"""Imports of other programs' checkpoints, exports for other programs, and conversions. README.md describes this wing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from holdfast_service.wing import OfflineParts, OwnJob, Wing

if TYPE_CHECKING:
    from holdfast_service.control.jobs.runner import JobKind
    from holdfast_service.daemon.job_workers import Workers


def _jobs(workers: Workers) -> dict[str, JobKind]:
    from holdfast_service.control.jobs.runner import JobKind  # a module of this package alone imports no service

    def made(kind: str) -> JobKind:
        from holdfast_service.wings.convert.jobs import jobs

        return jobs(workers)[kind]

    return {kind: JobKind.later(partial(made, kind)) for kind in ("export", "import")}


def _offline() -> OfflineParts:
    from holdfast_service.wings.convert import offline

    jobs = {
        "import": OwnJob(offline.bring, "imported", offline.foretell),
        "export": OwnJob(offline.export, "exported"),
    }
    return OfflineParts(jobs, offline.convert)


WING = Wing("convert", jobs=_jobs, offline=_offline)
