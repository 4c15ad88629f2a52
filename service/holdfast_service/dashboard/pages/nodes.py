"""Nodes: the daemons that write to this catalog, and the saves that each is writing."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_service.dashboard.asking import Asked, shown
from holdfast_service.dashboard.rendering import page
from holdfast_service.dashboard.routing import page_router

router = page_router()

ROUNDS_SHOWN = 50


@router.get("/nodes")
async def show_nodes(request: Request, api: Asked) -> Response:
    """Every daemon; below them the newest saves of all daemons."""
    nodes, ready, rounds = await asyncio.gather(
        api.page(bodies.Node, "/v1/nodes"),
        shown(api.get(bodies.Health, "/readyz")),
        api.page(bodies.Round, "/v1/rounds", limit=ROUNDS_SHOWN),
    )
    return page(request, "nodes.html", nodes=nodes.items, ready=ready, rounds=rounds.items)
