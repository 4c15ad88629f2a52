"""Acknowledges a run's death in its run.json, through the run or its alert.

Only a snooze's end is in the catalog, as for every alert.
"""

from __future__ import annotations

from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest.measurements import Acknowledgement, Attention, RunSummary
from holdfast_formats.rest.runs import RunChange
from holdfast_service.api.services import Services
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.insight.attention import DEATH
from holdfast_service.control.insight.summary_queries import Summaries


def see(services: Services, viewer: Principal, summaries: Summaries, run: str) -> Acknowledgement:
    """Acknowledge it by its alert; `NoSuchResource` if there is none."""
    summary = summaries.one(run)
    _alert(summary)
    _change(services, viewer, summaries, summary, seen=True)
    acknowledged = _alert(summaries.one(run)).acknowledged
    if acknowledged is None:  # the acknowledgement was withdrawn at this moment
        raise _none()
    return acknowledged


def take_back(services: Services, viewer: Principal, summaries: Summaries, run: str) -> None:
    """Withdraw the acknowledgement; `NoSuchResource` if there is none."""
    summary = summaries.one(run)
    if _alert(summary).acknowledged is None:
        raise _none()
    _change(services, viewer, summaries, summary, seen=False)


def _change(services: Services, viewer: Principal, summaries: Summaries, summary: RunSummary, seen: bool) -> None:
    services.control.catalog.database.check_writable()  # what is snoozed beside the run's file is there alone
    change = RunChange(acknowledged=seen)
    services.control.run_metadata.change(
        summary.run, change, summary.life, trains=summary.state == "running", by=viewer.name
    )
    summaries.death_seen(summary.run)


def _alert(summary: RunSummary) -> Attention:
    item = next((item for item in summary.attention if item.code == DEATH), None)
    if item is None:
        raise NoSuchResource(f"there is currently no alert {DEATH!r}", hint="list alerts with `GET /v1/alerts`")
    return item


def _none() -> NoSuchResource:
    return NoSuchResource(f"the alert {DEATH!r} is not acknowledged", hint="list acknowledged alerts with `GET /v1/alerts`")
