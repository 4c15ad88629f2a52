"""The services that the HTTP edge uses, passed in by the wiring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from fastapi import Depends, Query, Request

from holdfast_files.objects.traffic import Traffic
from holdfast_formats.naming import STEP_MAX
from holdfast_formats.rest import bodies
from holdfast_formats.timestamps import utc_now
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.refusals import Refusals
from holdfast_service.config import RootPlace
from holdfast_service.control.access.audit import DAYS, Audit
from holdfast_service.control.access.owner import Owner
from holdfast_service.control.access.tokens import Principal, Tokens, make_text
from holdfast_service.control.control import Control
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.run_groups import RunGroups
from holdfast_service.control.insight.saved_views import SavedViews
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.control.jobs.runner import JobRunner
from holdfast_service.control.retention.team_quotas import TeamQuotas
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.event_commands import EventCommands
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.saving.saver import Saver

LIMIT_MAX = 1000


@dataclass(frozen=True)
class Services:
    """What decides over a root, and the data plane of this node. `node` describes it; `replicas` retries copies to a
    replica, by its name, and returns whether this node copies there.
    """

    control: Control
    root: RootPlace
    version: str
    node: Callable[[], bodies.Node]
    saver: Saver
    arena: Arena
    remote: RemoteRanks
    runner: JobRunner
    summaries: Summaries
    history: RoundHistory
    lags: CopyLags
    replicas: Mapping[str, Callable[[], bool]]
    event_commands: EventCommands | None = None
    access: Policy = field(default_factory=Policy)
    owner: Owner = field(default_factory=lambda: Owner(make_text()))
    audit_days: int = DAYS
    bucket_traffic: Mapping[str, Traffic] = field(default_factory=dict)  # by the tier that is in a bucket

    @cached_property
    def audit(self) -> Audit:
        """The audit log. The end of the service closes it."""
        return Audit(self.control.catalog.database, self.control.events.node, utc_now, self.audit_days)

    @cached_property
    def team_quotas(self) -> TeamQuotas:
        return TeamQuotas(self.control.records, self.control.catalog.database)

    @cached_property
    def views(self) -> SavedViews:
        return SavedViews(self.control.records)

    @cached_property
    def groups(self) -> RunGroups:
        return RunGroups(self.control.records, self.control.catalog, self.summaries)

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.control.catalog.database, self.control.events, utc_now, self.owner)

    @cached_property
    def refusals(self) -> Refusals:
        return Refusals(self.control.events)


def _viewer(request: Request) -> Principal:
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Wired = Annotated[Services, Depends(_services)]
Viewer = Annotated[Principal, Depends(_viewer)]
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="maximum number of items on a page")]
Urls = Annotated[
    bool,
    Query(description="with URLs in the root's bucket, by which files are read without a token for 15 minutes"),
]
URL_S = 900
Cursor = Annotated[str | None, Query(max_length=4096, description="`next` of the previous page; opaque")]
StepMin = Annotated[int | None, Query(ge=0, le=STEP_MAX, description="only this step and later ones")]
StepMax = Annotated[int | None, Query(ge=0, le=STEP_MAX, description="only steps up to this one")]
Since = Annotated[str | None, Query(max_length=40, description="only from this time on, RFC 3339: 2030-01-31T12:00:00Z")]
