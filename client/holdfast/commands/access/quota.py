"""`holdfast quota`: limits on the bytes of all runs of a team."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.commands.retention import parse_bytes
from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest import lists
from holdfast_formats.rest.access import Quota, QuotaRequest

app = typer.Typer(help="Show and set how many bytes all runs of a team may hold together.", no_args_is_help=True)
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Runs: a name, a prefix ending in *, or * for all.")]
Size = Annotated[str, typer.Argument(metavar="BYTES", help="How much they may hold together, such as 20TB.")]


@app.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """List quotas, and how much of each is used."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        quotas = list(api.pages(lists.QUOTAS.path, Quota))
    console.listed(lists.QUOTAS, quotas, "No quotas.", as_json)


@app.command("set")
def set_(pattern: Pattern, size: Size, url: Url = None, as_json: AsJson = False) -> None:
    """Set the quota of a pattern of runs. It holds from the next save on."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        body = QuotaRequest(quota_bytes=parse_bytes(size) or 0).model_dump()
        made = api.parsed(api.request("PUT", _path(pattern), json=body).content, Quota)
    if as_json:
        console.print_json(made.model_dump())
    else:
        used, quota = (console.human_bytes(size) for size in (made.used_bytes, made.quota_bytes))
        console.out().print(f"runs {made.pattern} may hold {quota}; they hold {used}", markup=False)


@app.command()
def rm(pattern: Pattern, url: Url = None, as_json: AsJson = False) -> None:
    """Remove the quota of a pattern of runs."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        api.request("DELETE", _path(pattern))
    if as_json:
        console.print_json({"pattern": pattern, "removed": True})
    else:
        console.out().print(f"removed the quota of {pattern}", markup=False)


def _path(pattern: str) -> str:
    return f"/v1/quotas/{quote(pattern, safe='*')}"
