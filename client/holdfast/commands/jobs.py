"""`holdfast jobs`: submit, list, watch and cancel the service's background jobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.text import Text

from holdfast.config import default_url
from holdfast.link import roots
from holdfast.link.own_daemon import OwnDaemon
from holdfast.read.checkpoint_index import answers, of_service, step_of
from holdfast.rest import service_jobs
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import SELECTED, AsJson, NamedRoot, Url, one_place
from holdfast_formats.errors import exit_status, from_problem
from holdfast_formats.rest import lists
from holdfast_formats.rest.job_labels import Fact, facts
from holdfast_formats.rest.jobs import JobRequest, parse
from holdfast_formats.rest.offline import RootJob
from holdfast_formats.rest.operations import Job, JobKind, JobState

SHOWN_MAX = 50
WAIT_S = 0.5  # between two polls of a job

app = typer.Typer(help="Submit, list, watch and cancel background jobs.", no_args_is_help=True)
Number = Annotated[int, typer.Argument(metavar="JOB", help="The job ID.", min=0)]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show its progress until it ends.")]
Kind = Annotated[str | None, typer.Option("--kind", metavar="KIND", help=f"One of {', '.join(get_args(JobKind))}.")]
State = Annotated[str | None, typer.Option("--state", metavar="STATE", help=f"One of {', '.join(get_args(JobState))}.")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only jobs of this run.")]
Most = Annotated[int, typer.Option("--limit", "-n", metavar="N", help="Show at most N jobs.", min=1)]
Argument = Annotated[
    list[str] | None, typer.Option("--argument", "-a", metavar="NAME=VALUE", help="Further arguments of the job.")
]


@app.command("ls")
def list_jobs(
    kind: Kind = None,
    state: State = None,
    run: Run = None,
    limit: Most = SHOWN_MAX,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with console.service(url, as_json) as api:
        jobs = list(islice(api.jobs(kind, state, run), limit))
    console.listed(lists.JOBS, jobs, "No jobs.", as_json)


@app.command("show")
def show_job(job_id: Number, follow: Follow = False, url: Url = None, as_json: AsJson = False) -> None:
    """Show one job. With --follow, wait for its end; the exit status reports the result."""
    with console.service(url, as_json) as api:
        _show(api, api.job(job_id), follow, as_json)


@app.command("submit")
def submit_job(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(get_args(JobKind))}.")],
    target: Annotated[str | None, typer.Argument(metavar="RUN@STEP", help=f"The checkpoint: {SELECTED}.")] = None,
    argument: Argument = None,
    follow: Follow = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job to the service. An identical request returns the same job while it is queued or running."""
    with console.service(url, as_json) as api:
        _show(api, api.submit_job(_request(api, kind, target, argument or [])), follow, as_json)


@app.command("cancel")
def cancel_job(job_id: Number, url: Url = None, as_json: AsJson = False) -> None:
    """Ask a job to stop. Work that is already done is kept."""
    with console.service(url, as_json) as api:
        _show(api, api.cancel_job(job_id), False, as_json)


def finished(
    wanted: JobRequest, root: NamedRoot | None, url: str | None, doing: str | None = None, replicas: Sequence[Path] = ()
) -> dict[str, Any]:
    """The result of a job, done by the service, or in this `root`; its progress is shown as `doing`.

    A daemon of this user does it in any directory of this user, wherever the user names it. A daemon that serves `root` does
    it there, unless there are `replicas`, which are directories that only a program of this user reads.
    """
    one_place(root, url)
    with console.told(doing or "", shown=doing is not None) as on_bytes:
        if root is not None:
            own = OwnDaemon.serving(root.daemons) if wanted.wing else None
            if own is not None:
                return own.do(wanted, on_bytes)
            if (served := roots.running_url(root.daemons)) is not None and not replicas and answers(served):
                with Api(served) as api:
                    return service_jobs.as_job(api, wanted, on_bytes)
            work = RootJob(root=root.label, job=wanted, progress=True, replicas=tuple(map(str, replicas)))
            return service_jobs.offline(work, on_bytes)
        with Api(url or default_url()) as api:
            own = OwnDaemon.answering(api) if wanted.wing else None
            return service_jobs.as_job(api, wanted, on_bytes) if own is None else own.do(wanted, on_bytes)


def _request(api: Api, kind: str, target: str | None, arguments: list[str]) -> JobRequest:
    given = dict(text.partition("=")[::2] for text in arguments)
    run, step = None, None
    if target is not None:
        named = of_service(target)
        run, step = named.run, named.step
        if step is None and "@" in target:
            step = step_of(api, named)
    return parse({"kind": kind, "run": run, "step": step, "arguments": given})


def _show(api: Api, job: Job, follow: bool, as_json: bool) -> None:
    if follow:
        job = _followed(api, job, shown=not as_json)
    console.answer(job, lambda: _print(job), as_json)
    if follow and job.state == "failed":  # what went wrong is shown already
        raise typer.Exit(exit_status(from_problem(job.problem or {})))


def _followed(api: Api, job: Job, shown: bool) -> Job:
    with console.progress(f"{job.kind} {_subject(job)}", job.total_bytes or 0, shown) as bar:
        while job.state in ("queued", "running"):
            job = api.job(job.id, WAIT_S)
            bar.update(bar.task_ids[0], completed=job.done_bytes, total=job.total_bytes or None)
    return job


def _print(job: Job) -> None:
    out = console.out()
    out.print(Text.assemble(f"job {job.id}: {job.kind} {_subject(job)}  ", (job.state, console.STYLES[job.state])))
    about = {
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "node": job.node,
        "bytes": console.progress_text(job.done_bytes, job.total_bytes),
    }
    shown = [Fact(name.capitalize(), value) for name, value in about.items() if value is not None]
    result = {name: value for name, value in (job.result or {}).items() if name != "bytes"}
    shown += facts({**job.arguments, **result}, console.human_bytes, console.human_seconds)
    width = max(len(fact.name) for fact in shown)
    for fact in shown:
        out.print(Text(f"  {fact.name:<{width}}  {fact.text}"))
    if job.problem is not None:
        out.print(Text.assemble("  ", (str(job.problem.get("code")), "bold red"), f" {job.problem.get('detail')}"))


def _subject(job: Job) -> str:
    if job.run is None:
        return "-"
    return job.run if job.step is None else f"{job.run}@{job.step}"
