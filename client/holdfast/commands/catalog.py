"""`holdfast catalog`: compare the catalog with the directories, or rebuild it from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from holdfast.config import default_url
from holdfast.rest import service_jobs
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, NamedRoot, Url, one_place
from holdfast_formats.rest.consistency import CatalogAdoption, CatalogCheck, CatalogRebuild, Contradiction
from holdfast_formats.rest.jobs import RebuildJob
from holdfast_formats.rest.offline import CatalogWork

from .serve import check_installed

CHECK_TIMEOUT_S = 600.0
INCONSISTENT = 1  # the exit status for contradictions, as of `doctor`

app = typer.Typer(
    help="Check or rebuild the catalog. It is an index of the checkpoint directories.",
    no_args_is_help=True,
)
Root = Annotated[
    NamedRoot | None,
    typer.Option(
        "--root",
        metavar="ROOT",
        help="Work on this directory, or s3://BUCKET/PREFIX; no service may be serving it.",
        parser=NamedRoot.parse,
    ),
]
Catalog = Annotated[
    str | None,
    typer.Option(
        "--catalog", metavar="URL", help="With --root: URL of the catalog, if it is not the SQLite file in that directory."
    ),
]
Thorough = Annotated[bool, typer.Option("--thorough", help="Read every manifest, including those of unchanged checkpoints.")]


@app.command("check")
def check(
    root: Root = None, catalog: Catalog = None, thorough: Thorough = False, url: Url = None, as_json: AsJson = False
) -> None:
    """List every contradiction between the catalog and the directories. Changes nothing. Exit status 1 if there is
    one.
    """
    with console.reporting(as_json):
        if root is not None:
            one_place(root, url)
            result = CatalogCheck.model_validate(_offline("check-thorough" if thorough else "check", root.label, catalog))
        else:
            with Api(url or default_url(), CHECK_TIMEOUT_S) as api:
                answer = api.request("GET", "/v1/catalog/check", params={"thorough": thorough})
                result = api.parsed(answer.content, CatalogCheck)
    if as_json:
        console.print_json({**result.model_dump(), "sound": result.sound})
    else:
        counts = f"{result.checkpoints} checkpoints in {result.runs} runs, {result.manifests_read} manifests read"
        text = f"{result.catalog}: {counts}"
        console.out().print(text, markup=False)
        _print(result.items, result.count, "contradictions", "red")
    if not result.sound:
        raise typer.Exit(INCONSISTENT)


@app.command("rebuild")
def rebuild(root: Root = None, catalog: Catalog = None, url: Url = None, as_json: AsJson = False) -> None:
    """Rebuild the catalog from the directories. Data that only the catalog has is kept if it can be read.

    Exit status 1 if contradictions remain: check damaged checkpoints with `holdfast verify`.
    """
    with console.reporting(as_json):
        if root is not None:
            one_place(root, url)
            made = CatalogRebuild.model_validate(_offline("rebuild", root.label, catalog))
        else:
            with Api(url or default_url()) as api:
                made = CatalogRebuild.model_validate(service_jobs.as_job(api, RebuildJob(), lambda done, total: None))
    if as_json:
        console.print_json(made)
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
    root: Annotated[
        str, typer.Option("--root", metavar="ROOT", help="A directory, or s3://BUCKET/PREFIX; no service may be serving it.")
    ],
    catalog: Annotated[
        str | None, typer.Option("--catalog", metavar="URL", help="URL of the catalog that this root takes over.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hand a catalog over to a root that was moved or restored to here, by default the root's own. Stop the daemon of the
    old root first, and all daemons that share this one.

    The old root's daemon is refused from then on. Listed checkpoints that are not in this root are removed from
    the list at the next start.
    """
    with console.reporting(as_json):
        report = CatalogAdoption.model_validate(_offline("adopt", root, catalog))
    had = f"; it belonged to {report.before} before" if report.before is not None else ""
    console.answer(report, f"{report.catalog} now belongs to {report.root}{had}", as_json)


def _offline(act: Literal["check", "check-thorough", "rebuild", "adopt"], root: str, catalog: str | None) -> Any:
    check_installed()
    return service_jobs.offline(CatalogWork(act=act, root=root, catalog=catalog))


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
