"""Routes: the caller's identity, and the audit log."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import AUDITED, AuditEntry, Grant, Whoami
from holdfast_formats.rest.lists import AUDIT
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.services import Cursor, Limit, Since, Viewer, Wired
from holdfast_service.control.access.audit import WantedEntries

router = APIRouter(prefix="/v1", tags=["access"], responses=problems.RESPONSES)

CSV = "text/csv"


@router.get("/whoami", dependencies=needs("read", "none"), summary="The caller, and its permissions")
def get_whoami(request: Request, viewer: Viewer) -> Whoami:
    whole = getattr(request.state, "whole", viewer)
    return Whoami(
        name=whole.name,
        by=whole.by,
        scope=whole.scope,
        runs=whole.runs,
        grants=[Grant(scope=one.scope, runs=one.runs) for one in whole.grants],
        expires=whole.expires,
        address=request.client.host if request.client else "",
    )


@router.get(
    "/audit",
    dependencies=needs("admin"),
    summary="The audit log, newest first: acts with caller, address and result",
    response_model=bodies.Page[AuditEntry],
    responses={200: {"description": "A page; with `format=csv` its items as CSV", "content": {CSV: {}}}},
)
def list_audit(  # noqa: PLR0913 — one a filter
    services: Wired,
    who: Annotated[str | None, Query(max_length=128, description="only entries of this author")] = None,
    run: Annotated[str | None, Query(description="only entries about this run")] = None,
    kind: Annotated[str | None, Query(description="only entries of this kind")] = None,
    since: Since = None,
    refused: Annotated[bool | None, Query(description="only requests that were refused (401, 403), or only others")] = None,
    format: Annotated[Literal["json", "csv"], Query(description="`csv`: the page as a table, with a header")] = "json",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """All given filters apply together. A token for some runs sees the entries about these runs only."""
    if kind is not None and kind not in AUDITED:
        raise InvalidRequest(f"{kind!r} is not a kind of entry", hint=f"one of {', '.join(AUDITED)}")
    entries = services.audit.page(WantedEntries(who, run, kind, since, refused), cursor, limit)
    if format == "json":
        return JSONResponse(entries.model_dump(), headers={"Cache-Control": "no-store"})
    headers = {"Content-Disposition": 'attachment; filename="holdfast-audit.csv"', "Cache-Control": "no-store"}
    if entries.next is not None:
        headers["Link"] = f'<?cursor={entries.next}>; rel="next"'
    return Response(AUDIT.csv(entry.model_dump() for entry in entries.items), media_type=CSV, headers=headers)
