"""Targets of notifications, over the REST API. One function per route."""

from __future__ import annotations

from urllib.parse import quote

from holdfast.rest.api import Api
from holdfast_formats.rest.notifications import NotificationTarget, TestDelivery


def targets(api: Api) -> list[NotificationTarget]:
    """All targets; `NoSuchResource` if the daemon has none."""
    return list(api.pages("/v1/notifications", NotificationTarget))


def send_test(api: Api, name: str) -> TestDelivery:
    """Send a test message and return the result; `NoSuchResource`, `InUse`."""
    answer = api.request("POST", f"/v1/notifications/{quote(name, safe='')}/test")
    return api.parsed(answer.content, TestDelivery)
