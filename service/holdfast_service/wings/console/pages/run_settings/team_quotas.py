"""Quotas of teams: their use, and a form for viewers that may change them."""

from __future__ import annotations

from math import isfinite
from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request
from starlette.responses import Response

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.access import Quota, QuotaRequest
from holdfast_service.wings.console.rendering import page, see
from holdfast_service.wings.console.routing import Form, Posted, page_router
from holdfast_service.wings.console.viewer_api import Asked, shown

router = page_router()

BYTES_MAX = 2**62
QUOTAS_SHOWN = 50


@router.get("/quotas")
async def show_quotas(request: Request, api: Asked, first: Annotated[int, Query(ge=0)] = 0) -> Response:
    """The fullest first."""
    quotas = await shown(api.page(Quota, "/v1/quotas"))
    items = quotas.value.items if quotas.value else []
    fullest = sorted(items, key=lambda quota: (-quota.used_bytes / quota.quota_bytes, quota.pattern))
    part = fullest[first : first + QUOTAS_SHOWN]
    return page(
        request, "quotas.html", found=quotas, quotas=part, first=first, shown_at_once=QUOTAS_SHOWN, total=len(fullest)
    )


@router.post("/quotas")
async def set_quota(api: Asked, form: Posted) -> Response:
    await api.request("PUT", _at(form.text("pattern")), body=QuotaRequest(quota_bytes=_bytes(form)))
    return see("/quotas", "team-quota")


@router.post("/quotas/{pattern}/remove")
async def remove_quota(api: Asked, pattern: str, _: Posted) -> Response:
    await api.request("DELETE", _at(pattern))
    return see("/quotas", "team-quota-removed")


def _at(pattern: str) -> str:
    if not pattern:
        raise InvalidRequest("a quota needs a pattern of runs", hint="give a name, a prefix ending in *, or * for all")
    return f"/v1/quotas/{quote(pattern, safe='*')}"


def _bytes(form: Form) -> int:
    gigabytes = form.real("gigabytes")
    if gigabytes is None or not isfinite(gigabytes) or not 1 <= gigabytes * 1e9 <= BYTES_MAX:
        raise InvalidRequest("gigabytes: not a number above 0", hint="go back and change the field")
    return round(gigabytes * 1e9)
