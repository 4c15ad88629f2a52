"""Notifications: targets of alerts, results of deliveries, and a test message."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import Request
from starlette.responses import Response

from holdfast_formats.rest.lists import TARGETS
from holdfast_formats.rest.notifications import NotificationTarget, TestDelivery
from holdfast_service.wings.console.rendering import page
from holdfast_service.wings.console.routing import Posted, page_router
from holdfast_service.wings.console.viewer_api import LIMIT_MAX, Asked, ViewerApi, listed

router = page_router()


@router.get("/notifications")
async def show_notifications(request: Request, api: Asked) -> Response:
    return await _page(request, api, None)


@router.post("/notifications/{name}/test")
async def send_test(request: Request, api: Asked, name: str, _: Posted) -> Response:
    """Send a test message. The response is the result, not a redirect."""
    answer = await api.request("POST", f"/v1/notifications/{quote(name, safe='')}/test")
    return await _page(request, api, TestDelivery.model_validate_json(answer.content))


async def _page(request: Request, api: ViewerApi, tested: TestDelivery | None) -> Response:
    return page(
        request, "notifications.html", tested=tested, **await listed(api, NotificationTarget, TARGETS, None, LIMIT_MAX)
    )
