"""`holdfast nodes`: the daemons that share a catalog, what each holds and does, and how far it is behind."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.config import default_url
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.node_table import render
from holdfast.terminal.options import AsJson, Url

Forget = Annotated[
    list[str] | None, typer.Option("--forget", metavar="NAME", help="List this node no more; it has to be gone. Repeatable.")
]

Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate-secret", help="Give the nodes a new secret, by which they know each other. Twice ends the old one."
    ),
]


def nodes(forget: Forget = None, rotate_secret: Rotate = False, url: Url = None, as_json: AsJson = False) -> None:
    """Show the nodes that share this service's catalog: whether they are live, their ranks, duties and lag."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        for name in forget or ():
            api.forget_node(name)
        if rotate_secret:
            api.rotate_node_secret()
        found = api.nodes()
    if as_json:
        console.print_json([node.model_dump() for node in found])
        return
    for part in render(found):
        console.out().print(part)
