"""Checkpoints that are computed from others, by recipes. README.md describes this wing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_service.wing import OfflineParts, OwnJob, Wing

if TYPE_CHECKING:
    from holdfast_service.control.jobs.runner import JobKind
    from holdfast_service.daemon.job_workers import Workers


def _jobs(workers: Workers) -> dict[str, JobKind]:
    from holdfast_service.control.jobs.runner import JobKind  # a module of this package alone imports no service

    def made() -> JobKind:
        from holdfast_service.wings.merge.merge_jobs import jobs

        return jobs(workers)["merge"]

    return {"merge": JobKind.later(made)}


def _offline() -> OfflineParts:
    from holdfast_service.wings.merge.merge_jobs import own_merge

    return OfflineParts({"merge": OwnJob(own_merge, "merged")})


WING = Wing("merge", jobs=_jobs, offline=_offline)
