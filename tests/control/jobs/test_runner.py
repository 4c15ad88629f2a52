"""The runner: what becomes of a job's handler is what becomes of the job, and closing never waits for long."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from holdfast_formats.errors import CorruptExtent, InvalidRequest, NoSpace, NoSuchCheckpoint
from holdfast_formats.rest.jobs import ExportJob, VerifyJob
from holdfast_formats.rest.operations import Job
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.control.jobs import runner as job_runner
from holdfast_service.control.jobs.catalog import Jobs
from holdfast_service.control.jobs.runner import Cancelled, Handler, Interrupted, JobKind, JobRunner, Progress
from tests.daemons import wait_until
from tests.databases import sqlite_database

VERIFY = VerifyJob(run="a", step=1)
PATIENCE_S = 180.0


database = sqlite_database


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every report written, and signs of life given all the time."""
    monkeypatch.setattr(job_runner, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(job_runner, "ALIVE_EVERY_S", 0.01)


def a_runner(database: Database, handler: Handler, **options: Any) -> JobRunner:
    jobs = Jobs(database, "node-1", utc_now)
    return JobRunner(jobs, Events(database, "node-1", utc_now), {"verify": JobKind(handler, **options)})


def ended(runner: JobRunner, job: Job) -> Job:
    """The job once it has ended."""
    until = time.monotonic() + PATIENCE_S
    while (found := runner.jobs.get(job.id)).state in ("queued", "running"):
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


def told(runner: JobRunner) -> list[dict[str, Any]]:
    """What the events say of jobs that have ended; the last one is told just behind the row."""
    until = time.monotonic() + PATIENCE_S
    while runner.busy and time.monotonic() < until:
        time.sleep(0.01)
    return [event.detail for event in runner._events.after(0, 100, kind="job-ended")]


def until_stopped(started: threading.Event) -> Handler:
    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        started.set()
        while True:
            progress.report(1, 2)
            time.sleep(0.001)

    return handler


def at_work(database: Database) -> tuple[JobRunner, Job]:
    """A runner, and a job that runs until it is stopped."""
    started = threading.Event()
    runner = a_runner(database, until_stopped(started))
    runner.start()
    job, _ = runner.submit(VERIFY)
    assert started.wait(PATIENCE_S)
    return runner, job


def test_a_kind_is_made_when_a_job_needs_it() -> None:
    """Not before, and as it is then: its check refuses, and its handler does the job."""
    made = []

    def refuse(request: Any) -> None:
        raise InvalidRequest("not this one")

    def make() -> JobKind:
        made.append(1)
        return JobKind(lambda job, progress: {"job": job}, refuse)

    kind = JobKind.later(make)
    assert not made
    with pytest.raises(InvalidRequest, match="not this one"):
        kind.check(VERIFY)
    assert kind.handler("this", None) == {"job": "this"} and made  # type: ignore[arg-type]


def test_a_handler_does_its_job(database: Database) -> None:
    """It is handed the job, its progress can be read, and what it returns is the result."""
    seen: list[Job] = []

    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        seen.append(job)
        progress.report(4, 9)
        seen.append(runner.jobs.get(job.id))
        return {"bytes": 9}

    runner = a_runner(database, handler)
    runner.start()
    job, new = runner.submit(VERIFY)
    done = ended(runner, job)
    assert new and (done.state, done.result, done.problem, done.done_bytes) == ("done", {"bytes": 9}, None, 9)
    assert (seen[0].id, seen[1].state, seen[1].done_bytes, seen[1].total_bytes) == (job.id, "running", 4, 9)
    (event,) = told(runner)
    assert (event["job"], event["state"], event["result"]) == (job.id, "done", {"bytes": 9})
    runner.close()


def test_failures_are_told_by_name(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """An error of ours is the job's problem; any other stays opaque, with a reference that the log has beside the cause."""
    errors: list[Exception] = [
        CorruptExtent("bytes are wrong", hint="restore another", file="f"),
        ZeroDivisionError("hidden"),
    ]

    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        raise errors.pop(0)

    runner = a_runner(database, handler)
    runner.start()
    first = ended(runner, runner.submit(VERIFY)[0])
    assert first.state == "failed" and first.problem is not None
    assert (first.problem["code"], first.problem["file"]) == ("corrupt-extent", "f")
    second = ended(runner, runner.submit(VERIFY)[0])
    assert second.problem is not None and second.problem["code"] == "internal-error"
    assert "hidden" not in str(second.problem)
    assert second.problem["reference"] in caplog.text and "ZeroDivisionError" in caplog.text
    assert [event["state"] for event in told(runner)] == ["failed", "failed"]
    runner.close()


def test_what_cannot_work_is_refused_before_it_is_stored(database: Database) -> None:
    """A kind without a handler, by the wing that is not installed; and what the kind's own check refuses."""

    def check(request: VerifyJob) -> None:
        raise NoSuchCheckpoint("there is none")

    runner = a_runner(database, lambda job, progress: {}, check=check)
    with pytest.raises(InvalidRequest, match="'export'") as refused:
        runner.submit(ExportJob(run="a", step=1, arguments={"to": "out"}))
    assert "the wing 'convert'" in refused.value.hint
    with pytest.raises(NoSuchCheckpoint):
        runner.submit(VERIFY)
    assert runner.jobs.page(None, 10).items == []


def test_a_running_job_is_cancelled(database: Database) -> None:
    """Its handler is stopped at its next report; a queued job is cancelled on the spot, and both are told."""
    runner, running = at_work(database)
    queued, _ = runner.submit(VERIFY.model_copy(update={"step": 2}))
    assert runner.cancel(queued.id).state == "cancelled"
    runner.cancel(running.id)
    assert ended(runner, running).state == "cancelled"
    assert sorted(event["job"] for event in told(runner)) == [running.id, queued.id]
    runner.close()


def test_a_job_cancelled_through_another_node_stops(database: Database) -> None:
    """The catalog is where a node is told, with its signs of life."""
    runner, job = at_work(database)
    Jobs(database, "node-2", utc_now).cancel(job.id)
    assert ended(runner, job).state == "cancelled"
    runner.close()


def test_closing_puts_a_job_back_and_the_next_start_does_it(database: Database) -> None:
    """The service ends though a job is running; the job goes on, and its interrupted start is not counted."""
    runner, job = at_work(database)
    runner.close(PATIENCE_S)
    assert (runner.jobs.get(job.id).state, runner.busy) == ("queued", False)
    again = a_runner(database, lambda job, progress: {"tries": job.tries})
    again.start()
    assert ended(again, job).result == {"tries": 1}
    again.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_handler_hears_why_it_stops(database: Database, closes: bool) -> None:
    """What a closing service interrupts goes on later, so a handler may leave its work where it is; a cancelled one not."""
    started, heard = threading.Event(), list[type[Cancelled]]()

    def handle(job: Job, progress: Progress) -> dict[str, Any]:
        try:
            return until_stopped(started)(job, progress)
        except Cancelled as stopped:
            heard.append(type(stopped))
            raise

    runner = a_runner(database, handle)
    runner.start()
    job, _ = runner.submit(VERIFY)
    assert started.wait(PATIENCE_S)
    if not closes:
        runner.cancel(job.id)
        ended(runner, job)
    runner.close(PATIENCE_S)
    assert heard == [Interrupted if closes else Cancelled]


def test_closing_does_not_wait_for_a_handler_that_never_reports(database: Database) -> None:
    """It stays running in the catalog, and the next start puts it back."""
    started, release = threading.Event(), threading.Event()

    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        started.set()
        release.wait(PATIENCE_S)
        return {"late": True}

    runner = a_runner(database, handler)
    runner.start()
    job, _ = runner.submit(VERIFY)
    assert started.wait(PATIENCE_S)
    runner.close(0.05)
    assert runner.jobs.get(job.id).state == "running"
    again = a_runner(database, lambda job, progress: {"tries": job.tries})
    again.start()
    assert ended(again, job).result == {"tries": 2}
    release.set()
    while runner.busy:
        time.sleep(0.01)
    assert again.jobs.get(job.id).result == {"tries": 2}
    again.close()


def test_a_job_that_ends_its_service_is_given_up(database: Database) -> None:
    """After so many starts it has failed, and an event says so."""
    jobs = Jobs(database, "node-1", utc_now)
    job, _ = jobs.submit(VERIFY)
    for _ in range(3):
        assert jobs.claim(["verify"]) is not None
        if jobs.get(job.id).tries < 3:
            jobs.recover()
    runner = a_runner(database, lambda job, progress: {})
    runner.start()
    assert runner.jobs.get(job.id).state == "failed"
    assert [event["state"] for event in told(runner)] == ["failed"]
    runner.close()


def test_a_failing_catalog_does_not_stop_the_work(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be recorded is logged; the handler goes on."""
    reported = threading.Event()

    def handler(job: Job, progress: Progress) -> dict[str, Any]:
        with database.write() as session:
            session.connection().exec_driver_sql("DROP TABLE jobs")
        progress.report(1, 2)
        reported.set()
        return {}

    runner = a_runner(database, handler)
    runner.start()
    runner.submit(VERIFY)
    assert reported.wait(PATIENCE_S)
    wait_until(lambda: "cannot record the end of job" in caplog.text)
    runner.close()
    assert not runner.busy and "cannot record the progress" in caplog.text


def test_an_end_is_recorded_once_the_catalog_takes_it(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full when the job ended: nobody else would end it, and it would run for ever."""
    monkeypatch.setattr(job_runner, "END_AGAIN_S", 0.01)
    finish, tried = Jobs.finish, 0

    def full(*arguments: Any) -> Job | None:
        nonlocal tried
        tried += 1
        if tried < 4:
            raise NoSpace("the disk of the catalog is full", hint="free space")
        return finish(*arguments)

    monkeypatch.setattr(Jobs, "finish", full)
    runner = a_runner(database, lambda job, progress: {"found": 1})
    runner.start()
    job, _ = runner.submit(VERIFY)
    found = ended(runner, job)
    assert (found.state, found.result, found.tries, tried) == ("done", {"found": 1}, 1, 4)
    assert [event["state"] for event in told(runner)] == ["done"]
    runner.close()
