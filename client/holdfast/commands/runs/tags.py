"""`holdfast tags`: the tags of runs, and all runs with one of them as a group."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.terminal import completion, console
from holdfast.terminal.options import AsJson, Url

Tag = Annotated[str | None, typer.Argument(metavar="TAG", help="Show its runs.", autocompletion=completion.tags)]
Metric = Annotated[
    str,
    typer.Option("--metric", metavar="NAME", help="Metric to compare; otherwise loss, or the metric that most runs have."),
]
Highest = Annotated[bool, typer.Option("--highest", help="The highest value is the best, not the lowest.")]


def tags(tag: Tag = None, metric: Metric = "", highest: Highest = False, url: Url = None, as_json: AsJson = False) -> None:
    """List the tags of runs, or the runs of one tag. Each has its best and last metric."""
    from holdfast.rest import groups
    from holdfast_formats.rest import lists

    with console.service(url, as_json) as api:
        if tag is None:
            console.listed(lists.RUN_GROUPS, list(groups.groups(api, metric, highest)), "No run has a tag.", as_json)
            return
        found = groups.group(api, tag, metric, highest)
    if as_json:
        console.print_json(found)
    else:
        console.listed(lists.members(found), found.members, f"No run has the tag {tag}.", False)
