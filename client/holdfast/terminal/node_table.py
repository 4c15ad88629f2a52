"""The nodes of a cluster as a table, and what to do about those that are lost."""

from __future__ import annotations

from rich.text import Text

from holdfast.terminal import console
from holdfast.terminal.tables import Table
from holdfast_formats.rest.bodies import Node

LATE_S = 20.0  # a node renews its membership every 10 s
_COLOURS = {"live": "green", "returned": "yellow", "stopped": "dim", "lost": "bold red"}
_COLUMNS = ("NODE", "STATE", "RANKS", "MEMORY", "DUTIES", "BEHIND", "UP SINCE", "ADDRESS")
_DROPPED = ("ADDRESS", "UP SINCE", "MEMORY", "DUTIES")  # in this order


def render(found: list[Node]) -> list[Table | Text]:
    table = console.table(*_COLUMNS, right=("MEMORY",), drop=_DROPPED, wrap=("RANKS", "DUTIES", "BEHIND"))
    for node in found:
        state = Text(node.state, _COLOURS[node.state])
        if not node.live and node.heard_s is not None:
            state.append(f" {console.human_seconds(node.heard_s)}", "dim")
        ranks = ", ".join(f"{count} of {run}" for run, count in sorted(node.runs.items())) or str(node.ranks or "-")
        cells = (ranks, console.human_bytes(node.arena_bytes), ", ".join(node.duties) or "-", _behind(node))
        table.add_row(Text(node.name), state, *map(Text, cells), console.human_age(node.started), Text(node.url or "-"))
    lost = [node.name for node in found if node.state == "lost"]
    if not lost:
        return [table]
    advice = (
        f"! lost: {', '.join(lost)} → start the daemon there again, or `holdfast nodes --forget {lost[0]}` if it is gone"
    )
    return [table, Text(""), Text(advice, "yellow")]


def _behind(node: Node) -> str:
    if not node.live:
        return "-"
    texts = []
    if node.heard_s is not None and node.heard_s > LATE_S:
        texts.append(f"not heard of for {console.human_seconds(node.heard_s)}")
    if node.sealed:
        texts.append(f"{node.sealed} saves sealed")
    if node.catalog_waiting:
        texts.append(f"{node.catalog_waiting} records wait for the catalog")
    elif node.catalog:
        texts.append("the catalog does not answer")
    return "; ".join(texts) or "nothing"
