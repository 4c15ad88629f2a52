"""The audit log, with the same entries as CSV and JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import AUDITED, AuditEntry
from holdfast_service.wings.console.rendering import link, page
from holdfast_service.wings.console.routing import page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, shown

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
    asked = _asked(who, run, kind, refused)
    entries = await shown(api.page(AuditEntry, "/v1/audit", cursor=cursor, limit=ENTRIES_SHOWN, **asked))
    listed = entries.value or bodies.Page[AuditEntry](items=[])
    return page(
        request,
        "audit.html",
        found=entries,
        entries=listed.items,
        next=listed.next,
        first=cursor is None,
        asked=asked,
        kinds=AUDITED,
        as_csv=link("/v1/audit", format="csv", limit=LIMIT_MAX, **asked),
        as_json=link("/v1/audit", limit=LIMIT_MAX, **asked),
    )


def _asked(who: str, run: str, kind: str, refused: str) -> dict[str, str]:
    """The filters, for the API and the page's links."""
    return {"who": who, "run": run, "kind": kind, "refused": refused}
