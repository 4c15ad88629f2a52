"""Search: the page behind the search form of every page. With scripts, the palette uses the API itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest.search import SearchResult
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import Asked, to

router = page_router()

HITS_SHOWN = 100


@router.get("/find")
async def find(request: Request, api: Asked, q: Annotated[str, Query(max_length=256)] = "") -> Response:
    """The results; a single hit redirects to its page."""
    result = await api.get(SearchResult, "/v1/search", q=q, limit=HITS_SHOWN) if q.strip() else None
    if result is not None and len(result.items) == 1:
        hit = result.items[0]
        return see(to(hit.run, hit.step))
    return page(request, "find.html", q=q, found=result)
