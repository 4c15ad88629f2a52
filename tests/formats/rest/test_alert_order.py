"""The order of alerts."""

from __future__ import annotations

from holdfast_formats.rest.alert_order import ALERT_CODES, danger
from holdfast_formats.rest.measurements import Attention
from holdfast_service.wings.console.alert_actions import TITLES


def alert(code: str, level: str) -> Attention:
    return Attention.model_validate({"level": level, "code": code, "text": "t", "hint": "h"})


def test_errors_come_first_and_then_the_more_dangerous() -> None:
    """A code of a newer daemon stands behind those that are known, of its level."""
    ordered = [
        alert("saves-failing", "error"),
        alert("run-died", "error"),
        alert("checkpoint-damaged", "error"),
        alert("checkpoint-unhealthy", "error"),
        alert("disk-nearly-full", "error"),
        alert("of-a-newer-daemon", "error"),
        alert("disk-nearly-full", "warning"),
        alert("saves-too-often", "warning"),
    ]
    assert sorted(reversed(ordered), key=danger) == ordered


def test_every_alert_has_its_place_and_its_title() -> None:
    assert set(ALERT_CODES) == set(TITLES) and len(set(ALERT_CODES)) == len(ALERT_CODES)
