"""Nodes: the daemons of this catalog, their roles, and the newest saves of all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from urllib.parse import quote

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_service.wings.console.formatting import seconds_text
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, shown

router = page_router()

ROUNDS_SHOWN = 50
LATE_S = 20.0  # a node renews its membership every 10 s
FIRST = ("lost", "returned", "live", "stopped")
DUTIES = {
    "upkeep": "sweeps the root, ends the saves of nodes that are gone, and has retention applied",
    "notifications": "tells people of alerts",
}


@router.get("/nodes")
async def show_nodes(request: Request, api: Asked) -> Response:
    """Every daemon, those that need attention first; below them the newest saves of all daemons."""
    nodes, ready, rounds = await asyncio.gather(
        api.page(bodies.Node, "/v1/nodes"),
        shown(api.get(bodies.Health, "/readyz")),
        api.page(bodies.Round, "/v1/rounds", limit=ROUNDS_SHOWN),
    )
    listed = sorted(nodes.items, key=lambda node: (FIRST.index(node.state), node.name))
    return page(
        request,
        "nodes.html",
        nodes=listed,
        counts=Counter(node.state for node in listed),
        behind={node.name: behind(node) for node in listed},
        duties=DUTIES,
        ready=ready,
        rounds=rounds.items,
    )


@router.post("/nodes/{name}/forget")
async def forget(api: Asked, name: str, _: Posted) -> Response:
    await api.request("DELETE", f"/v1/nodes/{quote(name, safe='')}")
    return see("/nodes", "forgotten")


def behind(node: bodies.Node) -> list[str]:
    """How far a live node is behind, in words: its heartbeat, its saves, and its queued catalog writes."""
    texts: list[str] = []
    if not node.live:
        return texts
    if node.heard_s is not None and node.heard_s > LATE_S:
        texts.append(f"not heard of for {seconds_text(round(node.heard_s))}")
    if node.sealed:
        texts.append(f"{node.sealed} {'save' if node.sealed == 1 else 'saves'} sealed, not committed yet")
    if node.catalog:
        texts.append(node.catalog)
    elif node.catalog_waiting:
        many = node.catalog_waiting != 1
        texts.append(f"{node.catalog_waiting} {'records wait' if many else 'record waits'} for the catalog")
    return texts
