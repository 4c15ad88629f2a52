"""Routes: targets of alerts, for admins of all runs. They are set only in the file of `--notify`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.notifications import NotificationTarget, TestDelivery
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.wings.notify.notifier import Notifier
from holdfast_service.wings.notify.running import Parts

router = APIRouter(prefix="/v1", tags=["notifications"], responses=problems.RESPONSES)


@router.get("/notifications", dependencies=needs("admin", "all"), summary="Targets of notifications, without their secrets")
def list_notifications(parts: Parts) -> bodies.Page[NotificationTarget]:
    """What was sent, failed and dropped is counted over all nodes and starts. 404 if the daemon runs without `--notify`."""
    return bodies.Page(items=_notifier(parts).targets())


@router.post(
    "/notifications/{name}/test",
    dependencies=needs("admin", "all", act="notification-tested"),
    summary="Send a test message to a target, now",
)
def test_notification(parts: Parts, name: Annotated[str, Path(max_length=63)]) -> TestDelivery:
    """Answers when the target has accepted it, or says why it did not; of the target's answer only the status is told."""
    return _notifier(parts).test(name)


def _notifier(parts: Parts) -> Notifier:
    if parts.notifier is None:
        hint = "start it with `holdfast serve --notify FILE`; docs/telling.md describes the file"
        raise NoSuchResource("this daemon has no notification targets", hint=hint)
    return parts.notifier
