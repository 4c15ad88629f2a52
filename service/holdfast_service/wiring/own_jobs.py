"""Wires jobs of the daemon's own user, from the socket to the wings that do them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import parse
from holdfast_formats.staging import wire
from holdfast_service.control.access import audit
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.progress import Progress
from holdfast_service.daemon.own_jobs import OwnJobs
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.wing import RootWork, required


def own_jobs(node: str, control: Control, trains: Callable[[str], bool]) -> OwnJobs:
    """What does them on this root, each in the thread of its connection."""

    def do(request: wire.DoJob, progress: Progress) -> dict[str, Any]:
        job, here = parse(request.job), Path(request.directory)
        if not job.wing:
            raise InvalidRequest(f"{job.kind!r} jobs name no path", hint="submit it to the service: `holdfast jobs submit`")
        if not here.is_absolute():
            raise InvalidRequest(f"{request.directory!r} is not an absolute path", hint="use the `holdfast` command")
        kind = required(job.wing, f"a job of kind {job.kind!r}").offline().jobs[job.kind]
        give_way()
        done = kind.run(RootWork(control, here, trains), job, progress)
        if not done.get("dry_run"):
            audit.offline(control.catalog.database, node, f"checkpoint-{kind.done}", job.run, job.step)
        return done

    return do
