"""The audit log, with the same entries as CSV and JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import lists
from holdfast_formats.rest.access import AUDITED, AuditEntry
from holdfast_service.wings.console.rendering import link, page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, listed

router = page_router()

ENTRIES_SHOWN = 100
Text = Annotated[str, Query(max_length=200)]


@router.get("/audit")
async def show_audit(  # noqa: PLR0913 — one a filter
    request: Request,
    api: Asked,
    who: Text = "",
    run: Text = "",
    kind: Text = "",
    refused: Text = "",
    cursor: str | None = None,
) -> Response:
    """Show entries, newest first; the API filters them."""
    found = await listed(api, AuditEntry, lists.AUDIT, cursor, ENTRIES_SHOWN, who=who, run=run, kind=kind, refused=refused)
    as_json = link("/v1/audit", limit=LIMIT_MAX, **found["asked"])
    as_csv = link("/v1/audit", format="csv", limit=LIMIT_MAX, **found["asked"])
    return page(request, "audit.html", kinds=AUDITED, as_csv=as_csv, as_json=as_json, **found)
