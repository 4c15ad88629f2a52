"""Delegates work of the command line to the service, as a job, or to an offline program of the service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.rest.api import Api
from holdfast_formats.errors import CheckpointError, RoundAborted, from_problem
from holdfast_formats.installing import install
from holdfast_formats.rest.jobs import JobRequest
from holdfast_formats.rest.offline import OfflineWork
from holdfast_formats.rest.operations import Job

ENDED = ("done", "failed", "cancelled")
WAIT_S = 20.0
PROGRAM = "holdfast_service.offline"
OnBytes = Callable[[int, int], None]


def command() -> list[str]:
    """What starts the offline program, in the interpreter that runs now."""
    return [sys.executable, "-m", PROGRAM]


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


def offline(work: OfflineWork, on_bytes: OnBytes | None = None) -> dict[str, Any]:
    """Run it in a program of the service on this machine. Needs the service's packages.

    `on_bytes` receives the progress, if there is any; without it, warnings of the program are shown. If the caller is
    interrupted, so is the work, which cleans up first. If this process is killed, so is the work.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        seen = None if on_bytes is None else errors
        words = [*command(), str(os.getpid())]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=seen, text=True)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as asked:  # it may have ended, and says why
                asked.write(work.model_dump_json(by_alias=True))
            problem = _heard(process, on_bytes)
            status = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        errors.seek(0)
        why = (errors.read().strip().splitlines() or ["see its output above, if there is any"])[-1]
    if problem is None:
        raise CheckpointError(f"{PROGRAM} exited with status {status}: {why}", hint=install("service"))
    if status:
        raise from_problem(problem)
    return problem


def _heard(process: subprocess.Popen[str], on_bytes: OnBytes | None) -> dict[str, Any] | None:
    """The JSON document on a program's last line; None without one. Lines before it are `[done, total]` bytes."""
    last_line = None
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                last_line = document
            elif on_bytes is not None:
                on_bytes(*document)
    return last_line
