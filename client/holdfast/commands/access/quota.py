"""`holdfast quota`: limits on the bytes of all runs of a team."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.commands.retention import parse_bytes
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest import lists
from holdfast_formats.rest.access import Quota, QuotaRequest

app = typer.Typer(
    help="Show and set quotas of teams. A quota limits the total bytes of all runs that match a pattern.",
    no_args_is_help=True,
)
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Runs: a name, a prefix ending in *, or * for all.")]
Size = Annotated[str, typer.Argument(metavar="BYTES", help="The limit for the total of their bytes, such as 20TB.")]


@app.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """List quotas, and how much of each is used."""
    with console.service(url, as_json) as api:
        quotas = list(api.pages(lists.QUOTAS.path, Quota))
    console.listed(lists.QUOTAS, quotas, "No quotas.", as_json)


@app.command("set")
def set_(pattern: Pattern, size: Size, url: Url = None, as_json: AsJson = False) -> None:
    """Set the quota of a pattern of runs. It applies from the next save on."""
    with console.service(url, as_json) as api:
        body = QuotaRequest(quota_bytes=parse_bytes(size) or 0).model_dump()
        made = api.parsed(api.request("PUT", _path(pattern), json=body).content, Quota)
    used, quota = (console.human_bytes(size) for size in (made.used_bytes, made.quota_bytes))
    if made.used_bytes > made.quota_bytes:
        console.warn(
            f"runs {made.pattern} are already over the quota: their saves are refused until checkpoints are removed"
        )
    console.answer(made, f"runs {made.pattern} have a quota of {quota} and use {used}", as_json)


@app.command()
def rm(pattern: Pattern, url: Url = None, as_json: AsJson = False) -> None:
    """Remove the quota of a pattern of runs."""
    with console.service(url, as_json) as api:
        api.request("DELETE", _path(pattern))
    console.answer({"pattern": pattern, "removed": True}, f"removed the quota of {pattern}", as_json)


def _path(pattern: str) -> str:
    return f"/v1/quotas/{quote(pattern, safe='*')}"
