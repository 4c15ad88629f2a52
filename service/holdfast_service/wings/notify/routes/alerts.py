"""Routes: alerts, their acknowledgement, and an overview of the whole service."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from holdfast_formats import timestamps
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Acknowledgement, AcknowledgeRequest, Alert, Overview
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.routes.nodes import listed_nodes
from holdfast_service.api.services import Cursor, Limit, Services, Viewer, Wired
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.catalog.pages import decode_cursor, page
from holdfast_service.control.insight.acknowledgements import AlertKey
from holdfast_service.control.insight.attention import DEATH
from holdfast_service.control.insight.summary_board import key_of
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.wings.notify import alerts, death_acknowledgements
from holdfast_service.wings.notify.node_alerts import alerts_of_nodes

router = APIRouter(prefix="/v1", tags=["alerts"], responses=problems.RESPONSES)
TAKEN_BACK = "no longer acknowledged"
Subject = Annotated[str, Query(max_length=128, description="the replica or the node, of an alert that is about one")]
Seen = Annotated[bool | None, Query(description="only acknowledged alerts, or only others")]


@router.get("/overview", dependencies=needs("read"), summary="All runs in a few figures: states, alerts, exposure, cost")
def get_overview(services: Wired, viewer: Viewer) -> Overview:
    summaries = services.summaries
    return alerts.overview(summaries.board(), _of_nodes(services, viewer, summaries))


@router.get(
    "/alerts",
    dependencies=needs("read"),
    summary="What needs attention, with the remedy",
    response_model=bodies.Page[Alert],
)
def list_alerts(
    services: Wired,
    viewer: Viewer,
    acknowledged: Seen = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """First those that are not acknowledged, errors before warnings. They are some seconds old. Those of nodes and
    replicas are shown only to tokens for all runs.
    """
    summaries = services.summaries
    listed = alerts.without_what_follows([*alerts.of_runs(summaries.board()), *_of_nodes(services, viewer, summaries)])
    after = decode_cursor("alert", cursor)
    wanted = (one for one in listed if acknowledged is None or (one.acknowledged is not None) == acknowledged)
    ahead = sorted((one for one in wanted if after is None or alerts.place(one) > after), key=alerts.place)
    cut = page("alert", ahead[: limit + 1], limit, alerts.place)
    return Response(cut.model_dump_json(), media_type="application/json")  # serialized directly: an open overview polls it


@router.put(
    "/runs/{run}/alerts/{code}/acknowledgement",
    dependencies=needs("write", act="alert-acknowledged"),
    summary="Acknowledge an alert of a run",
)
def acknowledge(
    services: Wired, viewer: Viewer, run: str, code: str, body: AcknowledgeRequest, subject: Subject = ""
) -> Acknowledgement:
    """It is counted no more until it has ended and occurs again, or until the given time is over. 404 if there is no such
    alert now. `run-died` without a time is as `acknowledged` of the run: it is idle then.
    """
    summaries = services.summaries
    if code == DEATH and not subject and body.for_s is None:
        acknowledged = death_acknowledgements.see(services, viewer, summaries, run)
        _tell(services, viewer, AlertKey(run, code), "acknowledged", None)
        return acknowledged
    keys = {key_of(run, item) for item in summaries.one(run).attention}
    return _acknowledge(services, viewer, summaries, _existing(AlertKey(run, code, subject), keys), body)


@router.delete(
    "/runs/{run}/alerts/{code}/acknowledgement",
    dependencies=needs("write", act="alert-taken-back"),
    status_code=204,
    summary="Withdraw the acknowledgement of an alert of a run",
)
def take_back(services: Wired, viewer: Viewer, run: str, code: str, subject: Subject = "") -> None:
    summaries = services.summaries
    if code == DEATH and not subject:
        death_acknowledgements.take_back(services, viewer, summaries, run)
        _tell(services, viewer, AlertKey(run, code), TAKEN_BACK, None)
    else:
        _take_back(services, viewer, summaries, AlertKey(run, code, subject))


@router.put(
    "/alerts/{code}/{subject}/acknowledgement",
    dependencies=needs("admin", "all", act="alert-acknowledged"),
    summary="Acknowledge an alert of a node or replica",
)
def acknowledge_other(services: Wired, viewer: Viewer, code: str, subject: str, body: AcknowledgeRequest) -> Acknowledgement:
    """As for an alert of a run."""
    summaries = services.summaries
    keys = {alerts.keyed(alert) for alert in alerts.of_nodes(listed_nodes(services, viewer))}
    return _acknowledge(services, viewer, summaries, _existing(AlertKey("", code, subject), keys), body)


@router.delete(
    "/alerts/{code}/{subject}/acknowledgement",
    dependencies=needs("admin", "all", act="alert-taken-back"),
    status_code=204,
    summary="Withdraw the acknowledgement of an alert of a node or replica",
)
def take_back_other(services: Wired, viewer: Viewer, code: str, subject: str) -> None:
    _take_back(services, viewer, services.summaries, AlertKey("", code, subject))


def _of_nodes(services: Services, viewer: Principal, summaries: Summaries) -> list[Alert]:
    return alerts_of_nodes(services, summaries, viewer) if viewer.sees_all else []


def _existing(key: AlertKey, alert_keys: set[AlertKey]) -> AlertKey:
    if key not in alert_keys:
        raise NoSuchResource(f"there is currently no alert {key.code!r}", hint="list alerts with `GET /v1/alerts`")
    return key


def _acknowledge(
    services: Services, viewer: Principal, summaries: Summaries, key: AlertKey, body: AcknowledgeRequest
) -> Acknowledgement:
    now = timestamps.utc_now()
    until = None if body.for_s is None else timestamps.later(now, body.for_s)
    acknowledgement = Acknowledgement(by=viewer.name, at=now, until=until)
    summaries.acknowledgements.set(key, acknowledgement)
    _tell(services, viewer, key, f"acknowledged until {until}" if until else "acknowledged", until)
    return acknowledgement


def _take_back(services: Services, viewer: Principal, summaries: Summaries, key: AlertKey) -> None:
    if key not in summaries.acknowledgements.known([key.run]):
        raise NoSuchResource(
            f"the alert {key.code!r} is not acknowledged", hint="list acknowledged alerts with `GET /v1/alerts`"
        )
    summaries.acknowledgements.remove([key])
    _tell(services, viewer, key, TAKEN_BACK, None)


def _tell(services: Services, viewer: Principal, key: AlertKey, what: str, until: str | None) -> None:
    text = f"the alert {key.code}{f' of {key.subject}' if key.subject else ''} is {what}, by {viewer.name}"
    run, subject = key.run or None, key.subject or None
    services.control.events.add("alert-acknowledged", text, run, code=key.code, by=viewer.name, until=until, subject=subject)
