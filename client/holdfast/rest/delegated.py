"""Delegates work of the command line to the service, as a job, or to an offline program of the service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError, RoundAborted, from_problem
from holdfast_formats.rest.operations import Job, JobRequest

ENDED = ("done", "failed", "cancelled")
WAIT_S = 20.0
_PROGRAM = "holdfast_service.offline"
OnBytes = Callable[[int, int], None]


def as_job(api: Api, wanted: JobRequest, on_bytes: OnBytes) -> dict[str, Any]:
    """Run it as a job of the service, wait, and return the result. Raises the problem with which the job ended.

    The job continues if the caller stops waiting. `on_bytes` receives the progress.
    """
    job = api.parsed(api.request("POST", "/v1/jobs", json=wanted.model_dump()).content, Job)
    while job.state not in ENDED:
        on_bytes(job.done_bytes, job.total_bytes)
        job = api.parsed(api.request("GET", f"/v1/jobs/{job.id}", params={"wait_s": WAIT_S}).content, Job)
    if job.state == "cancelled":
        raise RoundAborted(f"job {job.id} was cancelled", hint="submit it again")
    if job.problem is not None:
        raise from_problem(job.problem)
    return job.result or {}


def offline(*arguments: str, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Run it in a directory that no daemon serves; `RootBusy` if one does. Needs the service's packages.

    `on_bytes` receives the progress, if there is any. If the caller is interrupted, so is the work, which cleans up
    first.
    """
    command = [sys.executable, "-m", _PROGRAM, *arguments, *(() if on_bytes is None else ("--progress",))]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            said = _heard(process, on_bytes)
            status = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        errors.seek(0)
        why = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
    if said is None:
        raise CheckpointError(
            f"{_PROGRAM} exited with status {status}: {why}", hint="pip install 'holdfast-checkpoint[service]'"
        )
    if status:
        raise from_problem(said)
    return said


def _heard(process: subprocess.Popen[str], on_bytes: OnBytes | None) -> dict[str, Any] | None:
    """The JSON document on a program's last line; None without one. Lines before it are `[done, total]` bytes."""
    said = None
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                said = found
            elif on_bytes is not None:
                on_bytes(*found)
    return said


def words(option: str, values: Sequence[object]) -> list[str]:
    """The option with each value, as a command line has it."""
    return [word for value in values for word in (option, str(value))]
