"""The services that the HTTP edge uses, passed in by the wiring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Query, Request

from holdfast_formats.errors import Damaged
from holdfast_formats.naming import STEP_MAX
from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import RenamedRun, TrashedRun
from holdfast_formats.timestamps import utc_now
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.access.refusals import Refusals
from holdfast_service.control.access.audit import DAYS, Audit
from holdfast_service.control.access.owner import Owner
from holdfast_service.control.access.tokens import Principal, Tokens, make_text
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints.run_metadata import RunMetadata
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.summary_queries import Lives, Summaries, no_lives
from holdfast_service.control.jobs.runner import JobRunner
from holdfast_service.control.nodes import ONE_NODE, Nodes
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.run_trash import RunTrash
from holdfast_service.control.retention.team_quotas import TeamQuotas
from holdfast_service.daemon.event_commands import EventCommands
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.storage import PosixStore, Store, Tier

LIMIT_MAX = 1000


@dataclass(frozen=True)
class Services:
    """The services of the HTTP edge. `files_root` is the tier's directory if it has one: then files are read from it
    directly.

    `remote` takes uploads; None without a daemon. `runner` runs jobs; None without them. `access` is the access policy.
    `suspect` is called with damage found by a request, to have it checked.
    """

    tier: Tier
    catalog: Catalog
    root: str
    version: str
    node: Callable[[], bodies.Node]
    rotation: Rotation
    events: Events
    files_root: Path | None = None
    remote: RemoteRanks | None = None
    suspect: Callable[[str, int, Damaged], None] = lambda run, step, error: None
    runner: JobRunner | None = None
    lives: Lives = no_lives  # what is known of the ranks of runs
    trash: RunTrash | None = None  # of a service with a daemon
    delete_run: Callable[..., TrashedRun] | None = None  # while no rank of it can join
    undelete_run: Callable[..., TrashedRun] | None = None
    rename_run: Callable[..., RenamedRun] | None = None
    access: Policy = field(default_factory=Policy)
    owner: Owner = field(default_factory=lambda: Owner(make_text()))
    record_queue: RecordQueue | None = None  # pending catalog writes, of a service that saves
    history: RoundHistory | None = None  # what saves took, of a service that watches them
    slots: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {})  # most bytes of the arena, its slots by use
    ranks: Callable[[], Mapping[str, int]] = dict  # how many are connected, by run
    nodes: Nodes = ONE_NODE
    checking: Callable[[str, int], bodies.Checking | None] = lambda run, step: None  # by several nodes
    held: Callable[[], Mapping[str, int]] = dict  # bytes of the arena, by run
    event_commands: EventCommands | None = None
    audit_days: int = DAYS

    @cached_property
    def summaries(self) -> Summaries:
        return Summaries(self.tier, self.catalog, self.lives)

    @cached_property
    def audit(self) -> Audit:
        """The audit log. The end of the service closes it."""
        return Audit(self.catalog.database, self.events.node, utc_now, self.audit_days)

    @cached_property
    def team_quotas(self) -> TeamQuotas:
        return TeamQuotas(self.tier, self.catalog.database)

    # Retries a replica; returns whether this node copies to it.
    replicas: Mapping[str, Callable[[], bool]] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.catalog.database, self.events, utc_now, self.owner)

    @cached_property
    def store(self) -> Store:
        return PosixStore(self.tier)

    @cached_property
    def run_metadata(self) -> RunMetadata:
        return RunMetadata(self.tier, self.catalog, self.rotation.files, self.events)

    @cached_property
    def refusals(self) -> Refusals:
        return Refusals(self.events)


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
Cursor = Annotated[str | None, Query(max_length=4096, description="`next` of the previous page; opaque")]
StepMin = Annotated[int | None, Query(ge=0, le=STEP_MAX, description="only this step and later ones")]
StepMax = Annotated[int | None, Query(ge=0, le=STEP_MAX, description="only steps up to this one")]
Since = Annotated[str | None, Query(max_length=40, description="only from this time on, RFC 3339: 2030-01-31T12:00:00Z")]
