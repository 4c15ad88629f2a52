"""`holdfast catalog`: compare the catalog with the directories, or rebuild it from them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from rich.text import Text

from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest, StorageFailed, from_problem
from holdfast_formats.rest.consistency import CatalogAdoption, CatalogCheck, CatalogRebuild, Contradiction
from holdfast_formats.rest.operations import Job, JobRequest

from .serve import check_installed

CHECK_TIMEOUT_S = 600.0
POLL_S = 0.5
INCONSISTENT = 1  # the exit status for contradictions, as of `doctor`

app = typer.Typer(
    help="The catalog is an index of the checkpoint directories: check that both agree, or rebuild it.",
    no_args_is_help=True,
)
Report = TypeVar("Report", bound=BaseModel)
Root = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="Work on this directory; no service may be serving it.")
]
Catalog = Annotated[
    str | None,
    typer.Option(
        "--catalog", metavar="URL", help="With --root: URL of the catalog, if it is not the SQLite file in that directory."
    ),
]
Thorough = Annotated[bool, typer.Option("--thorough", help="Read every manifest, also of unchanged checkpoints.")]


@app.command("check")
def check(
    root: Root = None, catalog: Catalog = None, thorough: Thorough = False, url: Url = None, as_json: AsJson = False
) -> None:
    """List every contradiction between the catalog and the directories. Changes nothing. Exit status 1 if there is
    one.
    """
    with console.reporting(as_json):
        if root is not None:
            _one_place(url)
            found = _offline(CatalogCheck, "check-thorough" if thorough else "check", root, catalog)
        else:
            with Api(url or default_url(), CHECK_TIMEOUT_S) as api:
                answer = api.request("GET", "/v1/catalog/check", params={"thorough": thorough})
                found = api.parsed(answer.content, CatalogCheck)
    if as_json:
        console.print_json({**found.model_dump(), "sound": found.sound})
    else:
        said = (
            f"{found.catalog}: {found.checkpoints} checkpoints in {found.runs} runs, {found.manifests_read} manifests read"
        )
        console.out().print(said, markup=False)
        _print(found.items, found.count, "contradictions", "red")
    if not found.sound:
        raise typer.Exit(INCONSISTENT)


@app.command("rebuild")
def rebuild(root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """Rebuild the catalog from the directories. Data that only the catalog has is kept where it can be read.

    Exit status 1 if contradictions remain: check damaged checkpoints with `holdfast verify`.
    """
    with console.reporting(as_json):
        if root is not None:
            _one_place(url)
            made = _offline(CatalogRebuild, "rebuild", root, catalog)
        else:
            made = _by_job(url or default_url())
    if as_json:
        console.print_json(made.model_dump())
    else:
        console.out().print(f"{made.checkpoints} checkpoints in {made.runs} runs are listed", markup=False)
        if made.set_aside is not None:
            kept = ", ".join(f"{count} {table}" for table, count in made.salvaged.items()) or "nothing"
            console.out().print(f"the old catalog was moved to {made.set_aside}; rows kept from it: {kept}", markup=False)
        _print(made.mended, len(made.mended), "mended", "green")
        _print(made.left, len(made.left), "left", "red")
    if made.left:
        raise typer.Exit(INCONSISTENT)


@app.command("adopt")
def adopt(
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="The root directory; no service may be serving it.")],
    catalog: Annotated[str, typer.Option("--catalog", metavar="URL", help="URL of the catalog that this root takes over.")],
    as_json: AsJson = False,
) -> None:
    """Hand a catalog over to a root that was moved or restored to here. Stop the daemon of the old root first.

    The old root's daemon is refused from then on. Listed checkpoints that are not in this root are removed from
    the list at the next start.
    """
    with console.reporting(as_json):
        made = _offline(CatalogAdoption, "adopt", root, catalog)
    if as_json:
        console.print_json(made.model_dump())
    else:
        had = f"; before, it belonged to {made.before}" if made.before is not None else ""
        console.out().print(f"{made.catalog} now belongs to {made.root}{had}", markup=False)


def _one_place(url: str | None) -> None:
    if url is not None:
        raise InvalidRequest("--root and --url cannot be combined", hint="pass only one of them")


def _offline(kind: type[Report], work: str, root: Path, catalog: str | None) -> Report:
    """Run the service's offline program on an unserved root; raises its errors."""
    check_installed()
    command = [sys.executable, "-m", "holdfast_service.offline", "catalog", work, "--root", str(root)]
    done = subprocess.run([*command, *(["--catalog", catalog] if catalog else [])], stdout=subprocess.PIPE, check=False)
    if done.returncode == 0:
        return kind.model_validate_json(done.stdout)
    try:
        problem = CatalogProblem.model_validate_json(done.stdout).model_dump()
    except ValueError as error:
        raise StorageFailed(f"the catalog program failed (exit status {done.returncode})") from error
    raise from_problem(problem)


class CatalogProblem(BaseModel, extra="allow"):
    code: str


def _by_job(url: str) -> CatalogRebuild:
    """Run it as a job of the service and wait until it ends."""
    with Api(url) as api:
        body = JobRequest(kind="rebuild").model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        job = api.parsed(api.request("POST", "/v1/jobs", content=body, headers=headers).content, Job)
        while job.state in ("queued", "running"):
            time.sleep(POLL_S)
            job = api.parsed(api.request("GET", f"/v1/jobs/{job.id}").content, Job)
    if job.result is not None:
        return CatalogRebuild.model_validate(job.result)
    raise from_problem(job.problem) if job.problem else StorageFailed(f"job {job.id} was {job.state}")


def _print(items: list[Contradiction], count: int, what: str, style: str) -> None:
    out = console.out()
    out.print(Text.assemble((f"{count} {what}" if count else f"no {what}" if what != "left" else "nothing remains", style)))
    if items:
        table = console.table("KIND", "WHAT", wrap=("WHAT",))
        for item in items:
            table.add_row(item.kind, Text(item.text))
        out.print(table)
    if count > len(items):
        out.print(f"and {count - len(items)} more", markup=False)
