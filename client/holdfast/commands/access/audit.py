"""`holdfast audit`: the audit log."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from holdfast.rest import filters
from holdfast.rest.api import PAGE_ITEMS
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Since, Url
from holdfast_formats.printable import visible_lines
from holdfast_formats.rest import lists
from holdfast_formats.rest.access import AuditEntry

RankIdentity = Annotated[str | None, typer.Option("--who", metavar="NAME", help="Only entries of this author.")]
Run = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only entries about this run.")]
Kind = Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only entries of this kind.")]
Refused = Annotated[bool, typer.Option("--refused", help="Only requests that were refused.")]
Count = Annotated[int, typer.Option("--count", "-n", metavar="N", help="At most N entries.", min=1)]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]


def audit(  # noqa: PLR0913 - options of a command
    who: RankIdentity = None,
    run: Run = None,
    kind: Kind = None,
    since: Since = None,
    refused: Refused = False,
    count: Count = 50,
    as_csv: AsCsv = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the audit log, newest first. It contains every change and every refused request."""
    query = {"who": who, "run": run, "kind": kind, "refused": "true" if refused else None}
    with console.service(url, as_json) as api:
        query["since"] = filters.since(since)
        if as_csv:
            limit = str(min(count, 1000))
            params = {name: value for name, value in {**query, "format": "csv", "limit": limit}.items() if value}
            text = api.request("GET", lists.AUDIT.path, params=params).text
            print(visible_lines(text.replace("\r\n", "\n")), end="")
            return
        limit = str(min(count, PAGE_ITEMS))
        entries = list(islice(api.pages(lists.AUDIT.path, AuditEntry, {**query, "limit": limit}), count))
    console.listed(lists.AUDIT, entries, "No entries.", as_json)
