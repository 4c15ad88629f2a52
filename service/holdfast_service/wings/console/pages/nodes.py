"""Nodes: the daemons of this catalog, their roles, and the newest saves of all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, shown

router = page_router()

ROUNDS_SHOWN = 20
NODES_SHOWN = 50
FIRST = ("lost", "returned", "live", "stopped")


@router.get("/nodes")
async def show_nodes(request: Request, api: Asked, first: Annotated[int, Query(ge=0)] = 0) -> Response:
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
        shown=listed[first : first + NODES_SHOWN],
        first=first,
        shown_at_once=NODES_SHOWN,
        lags=[lag for node in listed for lag in node.lags],
        counts=Counter(node.state for node in listed),
        ready=ready,
        rounds=rounds.items,
    )


@router.post("/nodes/{name}/forget")
async def forget(api: Asked, name: str, _: Posted) -> Response:
    await api.request("DELETE", f"/v1/nodes/{quote(name, safe='')}")
    return see("/nodes", "forgotten")
