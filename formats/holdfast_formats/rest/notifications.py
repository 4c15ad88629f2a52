"""Bodies of the REST API and of webhooks for notifications and watched daemons."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast_formats.body import Body
from holdfast_formats.rest.measurements import RunSummary

TargetKind = Literal["webhook", "slack", "mail"]
AlertLevel = Literal["warning", "error"]


class NoticedAlert(Body):
    """Something that needs attention, as a message tells it. Codes, texts and hints are those of a run's summary."""

    id: str = Field(description="the same in every message about this alert, including repeats and recovery")
    status: Literal["firing", "recovered"]
    level: AlertLevel
    code: str
    text: str
    hint: str
    run: str | None = Field(default=None, description="null if it concerns no run, such as a lost node")
    step: int | None = None
    since: str = Field(description="when it began, or if that is unknown, when it was first seen; RFC 3339, UTC")
    told: int = Field(default=0, description="how often it was sent to this target before")
    url: str | None = Field(default=None, description="the run's page, if the targets file gives an address")


class Notice(Body):
    """The JSON that a webhook receives: some alerts, or none in a test."""

    format: Literal[1] = 1
    kind: Literal["alerts", "test"]
    id: str = Field(description="the same if the message is sent again after a failure or a restart")
    at: str
    target: str
    node: str
    alerts: list[NoticedAlert]
    waiting: int = Field(default=0, description="alerts that did not fit; the next message has them")


class NotificationTarget(Body):
    """A target of the daemon's alerts. Secrets, and paths of addresses, are not shown."""

    name: str
    kind: TargetKind
    to: str = Field(description="the host of a webhook, or addressees and server of mail")
    runs: str = Field(description="a run's name, a prefix ending in *, or * for all")
    level: AlertLevel = Field(description="the lowest level that is sent")
    after_s: float = Field(description="alerts that clear sooner are not sent")
    repeat_s: float | None = Field(description="resend interval for alerts that are still firing; null: never")
    recovery: bool = Field(description="whether the end of an alert is sent")
    firing: int = Field(description="alerts sent to it that have not cleared")
    sent: int = Field(description="messages that were accepted, ever")
    failed: int = Field(description="attempts that failed, ever")
    dropped: int = Field(description="alerts that cleared before they could be sent, ever")
    last_sent: str | None
    last_node: str | None = Field(description="the node that sent or tried last")
    problem: str | None = Field(description="why the newest attempt failed; null if it succeeded")
    problem_since: str | None


class TestDelivery(Body):
    """What came of a test message."""

    __test__ = False  # it is no test, whatever a test runner takes it for

    target: str
    delivered: bool
    problem: str | None = None
    hint: str | None = None


class WatchedDaemon(Body):
    """Another daemon that this one watches. What it said last stays while it is unreachable."""

    name: str = Field(description="host and port of its address")
    url: str
    reachable: bool
    unreachable_since: str | None = None
    asked: str | None = Field(default=None, description="when it last responded; null if it never did")
    problem: str | None = Field(default=None, description="why it is unreachable; for tokens for all runs")
    version: str | None = None
    runs: int = 0
    errors: int = Field(default=0, description="errors that need attention, over all its runs")
    warnings: int = 0
    ranks: int = 0


class WatchedRun(Body):
    """A run of a watched daemon, as that daemon has summarised it."""

    daemon: str
    url: str = Field(description="the run's page at its daemon")
    reachable: bool = Field(description="false: this is the daemon's last report before it became unreachable")
    summary: RunSummary
