"""The order of alerts: by how much data is in danger."""

from __future__ import annotations

from holdfast_formats.rest.measurements import Attention

# The codes of all alerts, by how much data is in danger: work that is not saved or lost, what is stored, NaN, room for
# saves, copies; then what costs time alone.
ALERT_CODES = (
    "saves-failing",
    "bucket-refuses",
    "no-commit",
    "run-died",
    "checkpoint-missing",
    "checkpoint-damaged",
    "checkpoint-unhealthy",
    "disk-nearly-full",
    "quota-nearly-full",
    "replica-damaged",
    "replica-lost",
    "not-verified",
    "removal-waits",
    "replica-failing",
    "replica-lags",
    "replica-behind",
    "node-lost",
    "clock-differs",
    "storage-slow",
    "saves-dropped",
    "checkpoint-frozen",
    "saves-too-seldom",
    "saves-too-often",
)


def danger(alert: Attention) -> tuple[int, int]:
    """The sort key of alerts: errors before warnings, and those that put more data in danger first."""
    known = ALERT_CODES.index(alert.code) if alert.code in ALERT_CODES else len(ALERT_CODES)
    return int(alert.level != "error"), known
