"""`holdfast nodes`: the daemons that share a catalog, what each holds and does, and how far it is behind."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest.bodies import Node

from .top import human_seconds

LATE_S = 20.0  # a node renews its membership every 10 s
_COLOURS = {"live": "green", "returned": "yellow", "stopped": "dim", "lost": "bold red"}
_COLUMNS = ("NODE", "STATE", "RANKS", "MEMORY", "DUTIES", "BEHIND", "UP SINCE", "VERSION", "ADDRESS")

Forget = Annotated[
    list[str] | None, typer.Option("--forget", metavar="NAME", help="List this node no more; it has to be gone. Repeatable.")
]


def nodes(forget: Forget = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show the nodes that share this service's catalog: whether they are live, their ranks, duties and lag."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        for name in forget or ():
            api.forget_node(name)
        found = api.nodes()
    if as_json:
        console.print_json([node.model_dump() for node in found])
        return
    console.out().print(render(found))


def render(found: list[Node]) -> RenderableType:
    """The table, and below it what to do about nodes that are lost."""
    table = console.table(*_COLUMNS, right=("MEMORY",))
    for node in found:
        state = Text(node.state, _COLOURS[node.state])
        if not node.live and node.heard_s is not None:
            state.append(f" {human_seconds(node.heard_s)}", "dim")
        ranks = ", ".join(f"{count} of {run}" for run, count in sorted(node.runs.items())) or str(node.ranks or "-")
        cells = (ranks, console.human_bytes(node.arena_bytes), ", ".join(node.duties) or "-", _behind(node))
        table.add_row(
            Text(node.name), state, *map(Text, cells), console.human_age(node.started), node.version, Text(node.url or "-")
        )
    lost = [node.name for node in found if node.state == "lost"]
    if not lost:
        return table
    advice = (
        f"! lost: {', '.join(lost)} → start the daemon there again, or `holdfast nodes --forget {lost[0]}` if it is gone"
    )
    return Group(table, Text(""), Text(advice, "yellow"))


def _behind(node: Node) -> str:
    if not node.live:
        return "-"
    said = []
    if node.heard_s is not None and node.heard_s > LATE_S:
        said.append(f"not heard of for {human_seconds(node.heard_s)}")
    if node.sealed:
        said.append(f"{node.sealed} saves sealed")
    if node.catalog_waiting:
        said.append(f"{node.catalog_waiting} records wait for the catalog")
    elif node.catalog:
        said.append("the catalog does not answer")
    return "; ".join(said) or "nothing"
