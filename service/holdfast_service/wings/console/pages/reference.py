"""The reference of the API: every route and body, as Swagger UI shows the API's own description."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked

router = page_router()


@router.get("/api")
async def show_reference(request: Request, api: Asked) -> Response:
    """The browser reads the description itself; asking for it here first sends callers without a token to the sign-in."""
    await api.request("GET", "/openapi.json")
    return page(request, "reference.html")
