"""`holdfast nodes`: the daemons that share a catalog, what each holds and does, and how far each is behind."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest import lists

Forget = Annotated[
    list[str] | None, typer.Option("--forget", metavar="NAME", help="Stop listing this lost node. Repeatable.")
]

Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate-secret", help="Give the nodes a new shared secret. The old one stays valid until the next rotation."
    ),
]


def nodes(forget: Forget = None, rotate_secret: Rotate = False, url: Url = None, as_json: AsJson = False) -> None:
    """Show the nodes that share this catalog. Each has its state, ranks, duties and lag.

    Below, their replicas and tiers: what has yet to be copied, and what is copied now.
    """
    with console.service(url, as_json) as api:
        for name in forget or ():
            api.forget_node(name)
        if rotate_secret:
            api.rotate_node_secret()
        found = api.nodes()
    console.listed(lists.NODES, found, "No daemon writes to this catalog.", as_json)
    lags = [lag for node in found for lag in node.lags]
    if lags and not as_json:
        console.out().print()
        console.listed(lists.REPLICAS, lags, "", as_json)
    lost = [node.name for node in found if node.state == "lost"]
    if lost and not as_json:
        gone = f"start the daemon there again, or `holdfast nodes --forget {lost[0]}` if it is gone"
        console.out().print(f"\n! lost: {', '.join(lost)} → {gone}", style="yellow", markup=False)
