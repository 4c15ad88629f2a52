"""Assembles control over a root, a node's data plane, and the services of the HTTP edge.

The `stack` closes everything, the last first. Only `__main__` is above this module.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, NoSpace
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import matches
from holdfast_formats.timestamps import utc_now
from holdfast_service import __version__
from holdfast_service.config import (
    Config,
    RootPlace,
    fd_store,
    is_shared,
    successor_environment,
)
from holdfast_service.control.catalog import recovery
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import ownership, roots
from holdfast_service.control.control import Control
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.engines import address
from holdfast_service.control.insight.facts import RunActivity
from holdfast_service.control.insight.round_history import RoundHistory
from holdfast_service.control.insight.summary_queries import POLICY_KNOWN_S, Summaries
from holdfast_service.control.jobs.runner import JobRunner
from holdfast_service.control.root_watch import RootWatch
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.arena.callers import Callers
from holdfast_service.daemon.arena.fd_keeper import DescriptorKeeper, FdStore, HolderProcess, OfRoot, holder_path, lost_saves
from holdfast_service.daemon.arena.holder import Start
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.shares import Shares, StagingQuota
from holdfast_service.daemon.arena.spill import Spill
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.checking.node_checks import ScrubClaims
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.daemon.event_commands import EventCommands
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.daemon.rank_connection import DataPlane
from holdfast_service.daemon.remote import RemoteRanks
from holdfast_service.daemon.saving import sweeping
from holdfast_service.daemon.saving.adoption import Adoption
from holdfast_service.daemon.saving.other_nodes import OtherNodes
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.saving.sweeping import Sweeper
from holdfast_service.daemon.scrub import CheckJobs, Scrub, ScrubPlan
from holdfast_service.daemon.server import Daemon
from holdfast_service.daemon.serving import Serving
from holdfast_service.daemon.writing.disk_throughput import PROBE_BYTES
from holdfast_service.observe import bucket_traffic
from holdfast_service.storage import RootStorage, disk_speed, stored_in, tier_at
from holdfast_service.storage.identity import Identity, Whereabouts, catalog_of, settle
from holdfast_service.storage.pacing import Pace
from holdfast_service.wing import RunningWing, installed, require
from holdfast_service.wiring.commands import commit_commands, event_commands
from holdfast_service.wiring.job_handlers import start_jobs
from holdfast_service.wiring.nodes import NodesOfRoot, nodes_of, put_intents
from holdfast_service.wiring.own_jobs import own_jobs
from holdfast_service.wiring.replication import Replication, RestoreRepair
from holdfast_service.wiring.watching import watch

if TYPE_CHECKING:
    from holdfast_service.api.access.authentication import Policy
    from holdfast_service.api.services import Services

log = logging.getLogger("holdfast_service")

FIRST = (
    "start PostgreSQL, or correct --catalog: the catalog must answer at the first start. It needs its own "
    "database, and a user that may create tables"
)
SWEPT_LOOKS = 12  # looks at a root between two sweeps, which ask a bucket for some ten things
SUCCESSOR_IDLE_S = 60  # a daemon that was started for staged saves alone ends when it has had nothing to do for so long


class ServedRoot(NamedTuple):
    """A root that this daemon serves, and all that decides over it."""

    place: RootPlace
    identity: Identity
    control: Control
    nodes: NodesOfRoot


class NodeParts(NamedTuple):
    """The data plane of this machine, and its background work."""

    daemon: Daemon
    saver: Saver
    scrub: Scrub
    arena: Arena
    remote: RemoteRanks
    runner: JobRunner
    url: str | None  # of its API
    others: OtherNodes
    on_event: EventCommands | None
    replication: Replication
    keeper: str  # of the memory of staged saves, if the daemon is killed


class NodeFacts(NamedTuple):
    """What this node tells: its description, and the history of its saves."""

    about: Callable[[], bodies.Node]
    history: RoundHistory


def open_root(config: Config, stack: ExitStack) -> ServedRoot:
    """The root's storage and catalog; a missing or damaged catalog is rebuilt, one of another root is refused.

    With a catalog that several nodes can share, this daemon is a node of a cluster.
    """
    shared = is_shared(config.catalog_url)
    pace = Pace(config.write_bytes_per_second) if config.write_bytes_per_second else None
    place = config.place
    Database.at(config.catalog_url).close()  # a URL that is none is refused by name
    shared_by = address(config.catalog_url) if shared else None
    storage = _storage(config, pace, shared_by, stack)
    where = Whereabouts(place.directory, place.label if place.bucket else "")
    identity = settle(storage.records, where, shared_by, later=True)
    owner = ownership.Root(identity.mark.id, place.label, place.directory, config.node)
    try:
        catalog, _, _, rebuilt = recovery.open_catalog(config.catalog_url, config.node)
        ownership.claim(storage.store, catalog, owner, utc_now())
    except (CatalogUnavailable, NoSpace) as away:
        # A mistake in the URL must not be stored for later daemons.
        if shared and catalog_of(storage.records, where) is None:
            raise CatalogUnavailable(
                f"{away.detail}; no daemon has served {place.label} with this catalog yet", hint=FIRST
            ) from away
        log.error("%s; the daemon starts without it: saves continue and are recorded when it answers", away.detail)
        catalog, rebuilt = Catalog(Database.at(config.catalog_url), config.node), None
        catalog.database.away(away.detail, reads=True)
    stack.callback(catalog.close)
    settle(storage.records, where, shared_by)
    if shared:
        storage = storage.shared()
    serving = nodes_of(config, catalog.database)

    def claim() -> None:
        ownership.claim(storage.store, catalog, owner, utc_now())
        serving.nodes.join(0.0)

    control = Control(
        storage, catalog, config.keep, serving.nodes, usual=config.usual_policy, trash_days=config.trash_days, claim=claim
    )
    if rebuilt is not None:
        control.events.add("catalog-rebuilt", rebuilt, level="warning")
    stack.callback(serving.nodes.close)
    with suppress(CatalogUnavailable):
        serving.nodes.join()
    stack.callback(control.close)
    return ServedRoot(place, identity, control, serving)


def _storage(config: Config, pace: Pace | None, shared_by: str | None, stack: ExitStack) -> RootStorage:
    place = config.place
    if place.bucket is None:
        return stored_in(tier_at(place.directory, pace, config.node if shared_by else ""))
    from holdfast_service.storage.objects.opening import SharedCatalog, open_bucket  # which need the extra s3

    shared = SharedCatalog(shared_by, partial(put_intents, config, stack)) if shared_by else None
    storage = open_bucket(
        place.bucket, config.node, place.directory, alone=config.alone, shared=shared, storing=config.storing
    )
    stack.callback(storage.close)
    return storage


def open_node(config: Config, root: ServedRoot, url: str | None, stack: ExitStack) -> NodeParts:
    """The daemon, listening at its socket. Adopts an earlier daemon's work, and starts due checks and copies."""
    place, (mark, _), control, nodes = root
    records = control.records
    budget = Budget(config.arena_bytes_max)
    keeper = OfRoot(_keeper(root, config), mark.id)
    log.info("staged saves are kept by %s if this daemon is killed", keeper.place)
    for record in lost_saves(_holder_path(root, config)):
        control.staged_before.let_go(record)
    stack.callback(keeper.close)
    holds = MemoryCheckpoints(control.lineage_index.launch, partly=not control.nodes.alone)
    replication = Replication(config, control, holds.lend)
    checker = Checker(records, control, replication.repairer.repair)
    others = nodes.data_plane(control, holds, stack)
    spill = Spill(place.directory, partial(_staging_quotas, control)) if config.spill == "auto" else None
    arena = Arena(budget, keeper, spill, holds.make_room, Shares(config.run_share, config.token_share))
    averages = Averages(arena, others.agreement)
    probe = None if place.bucket else partial(disk_speed.measure, place.directory, PROBE_BYTES)
    saver = Saver(records, control, config.node, checker, others, holds=holds, averages=averages, probe=probe)
    adoption = Adoption(arena, saver, control)
    on_event, busy = _commands(config, root, url, stack)
    control.recovery.recover(adoption.start)
    averages.recover()
    averages.start()
    scrub = _scrub(config, checker, control, saver, others.claims)
    stack.callback(scrub.close)
    replication.start()
    stack.callback(replication.close)
    RestoreRepair(checker, replication, control).serve(lambda: saver.restores.under_way)
    about = Serving(config.node, place.label, mark, __version__, url)
    trains = partial(_trains, saver, control)
    own = own_jobs(config.node, control, trains)
    parts = DataPlane(arena, saver, control, adoption, averages, others.slots(lambda: arena.spare_bytes), own)
    callers = Callers.of_group(config.socket_group)
    if place.bucket is None:
        callers.warn_if_closed(place.directory)
    daemon = Daemon(config.socket.absolute(), about, parts, callers, lambda: any(one() for one in busy))
    stack.callback(daemon.close)
    control.trash.restored.subscribe(scrub.check_soon)
    _watch_root(control.watch, saver, scrub, stack)
    sweep_s = max(sweeping.LOOK_S, SWEPT_LOOKS * control.watch.looks.every_s(1))
    stack.callback(Sweeper(control.empty_runs, saver, arena, sweep_s, control.trash.expire).close)
    remote = RemoteRanks(arena, saver, control, config.silence_max, mark.id)
    stack.callback(remote.close)
    _start_copiers(config, control, saver, stack)
    checks = CheckJobs(checker, scrub, records)
    workers = Workers(control.catalog, control, checks, replication.repairer, config.export_root, trains)
    runner = start_jobs(config.node, workers)
    stack.callback(runner.close)
    log.info("arena: up to %d bytes (%s)", budget.bytes_max, budget.name)
    return NodeParts(daemon, saver, scrub, arena, remote, runner, url, others, on_event, replication, keeper.place)


def _staging_quotas(control: Control, run: str) -> list[StagingQuota]:
    """Quotas on staged data: those of the run and of its team."""
    quotas = control.admission.quotas(run).items()
    return [StagingQuota(f"the quota of the runs {pattern}", size, partial(matches, pattern)) for pattern, size in quotas]


def _commands(
    config: Config, root: ServedRoot, url: str | None, stack: ExitStack
) -> tuple[EventCommands | None, list[Callable[[], bool]]]:
    """The command for events, and what says whether it, or the one for commits, is at work."""
    commands, on_event = (
        commit_commands(config, root.control, root.place, url),
        event_commands(config, root.control.events, root.place),
    )
    if on_event is not None:
        stack.callback(on_event.close)
    if commands is not None:
        stack.callback(commands.close)
        root.control.published.subscribe(commands.committed)
    return on_event, [one.busy for one in (commands, on_event) if one is not None]


def _about(config: Config, root: ServedRoot, node: NodeParts) -> Callable[[], bodies.Node]:
    """The description of this node."""
    saver, daemon = node.saver, node.daemon
    at = os.stat(daemon.path)
    socket_id = naming.socket_id(at.st_ino, at.st_ctime_ns)
    started = utc_now("seconds")

    def about() -> bodies.Node:
        return bodies.Node(
            name=config.node,
            pid=os.getpid(),
            version=__version__,
            root=root.place.label,
            socket=str(daemon.path),
            started=started,
            arena_bytes=node.arena.bytes,
            ranks=daemon.ranks + node.remote.count,
            socket_id=socket_id,
            memory=[
                bodies.InMemory(run=of.run, step=of.step, attempt=of.attempt, ranks=ranks, bytes=size)
                for of, ranks, size in saver.holds.report()
            ],
            averages=[] if saver.averages is None else saver.averages.report(),
            busy=saver.working or node.scrub.waiting,
            catalog=root.control.record_queue.state,
            catalog_waiting=root.control.record_queue.pending,
            sealed=saver.sealed,
            keeper=node.keeper,
            arbiter=root.control.storage.arbiter,
            host=platform.node(),
            url=node.url,
            exchange=node.others.url,
            replicas={name: one.said for name, one in node.replication.replicators.items() if one.is_mine()},
            lags=node.replication.lag_reports.now(),
            bucket=bucket_traffic.described(root.control.storage.traffic),
        )

    return about


def observe(config: Config, root: ServedRoot, node: NodeParts, stack: ExitStack) -> NodeFacts:
    """Tell other nodes about this one, and trace its saves, until `stack` unwinds."""
    about = _about(config, root, node)
    node.others.start(node.saver, about, lambda: node.arena.holders)
    return NodeFacts(about, watch(config, root.control.catalog.database, stack))


def services(config: Config, root: ServedRoot, node: NodeParts, observed: NodeFacts, access: Policy) -> Services:
    """The services that the HTTP edge and the wings use."""
    from holdfast_service.api.services import Services

    saver, control = node.saver, root.control

    def lives(runs: Collection[str] | None) -> Mapping[str, RunActivity]:
        return control.lives.by_run(runs, saver.connected.lives())

    known_s = max(POLICY_KNOWN_S, control.storage.looks.every_s(1))
    lags = node.replication.lags
    summaries = Summaries(control.store, control.catalog, lives, policy_known_s=known_s, lags=lags)
    control.rotation.applied.subscribe(summaries.policy_applied)
    return Services(
        control,
        root.place,
        __version__,
        observed.about,
        saver,
        node.arena,
        node.remote,
        node.runner,
        summaries,
        observed.history,
        lags,
        replicas={name: one.retry for name, one in node.replication.replicators.items()},
        event_commands=node.on_event,
        access=access,
        audit_days=config.audit_days,
        bucket_traffic=node.replication.traffic,
    )


def start_wings(config: Config, services: Services, stack: ExitStack) -> dict[str, RunningWing]:
    """The running parts of the installed wings, by name, until `stack` unwinds."""
    if config.notify is not None or config.watch:
        require("notify", "--notify or --watch")
    return {one.name: one.start(config, services, stack) for one in installed() if one.start is not None}


def _scrub(config: Config, checker: Checker, control: Control, saver: Saver, claims: ScrubClaims | None) -> Scrub:
    """The scrub, which begins with committed checkpoints that were never checked, found now or left by a daemon that died.
    If there may be other nodes, these may be about to check them: the scrub looks twice.
    """
    rate = config.scrub_bytes_per_second
    plan = ScrubPlan(rate, config.scrub_every) if rate else ScrubPlan(None, None)
    scrub = Scrub(checker, control, saver, plan, claims)
    if claims is not None:
        return scrub
    try:
        scrub.check_soon(place for place in control.findings.unchecked() if not saver.checks.awaits(*place))
    except CatalogUnavailable as away:
        log.warning("only the scrub will find checkpoints that were never verified: %s", away.detail)
    return scrub


def _trains(saver: Saver, control: Control, run: str) -> bool:
    """Whether ranks of a run are connected, to this node or to another one."""
    return run in saver.connected.runs or run in control.nodes.connected()


def _watch_root(watch: RootWatch, saver: Saver, scrub: Scrub, stack: ExitStack) -> None:
    """Watch changes to the root's checkpoints by others, until `stack` unwinds; changed ones are repaired or checked."""
    watch.suspected.subscribe(saver.checks.suspect)
    watch.unread.subscribe(lambda places: scrub.check_soon([one for one in places if not saver.checks.awaits(*one)]))
    stack.callback(watch.close)
    watch.start()


def _start_copiers(config: Config, control: Control, saver: Saver, stack: ExitStack) -> None:
    """The workers that thin checkpoints of each run whose policy was applied, at a scrub's read rate, and give them files of
    their own, until `stack` unwinds.
    """
    pace = Pace(rate) if (rate := config.scrub_bytes_per_second) else None
    suspect, node = saver.checks.suspect, control.nodes.node
    for worker in (
        Thinner(control.store, control.thinning, node=node, pace=pace, suspect=suspect).worker,
        SecondCopier(control.store, control.second_copies, control.readers, suspect=suspect).worker,
    ):
        stack.callback(worker.close)
        control.rotation.applied.subscribe(worker.due)
        for run in roots.runs(control.records):  # an earlier daemon may have been in the middle of it
            worker.due(run)


def _keeper(root: ServedRoot, config: Config) -> DescriptorKeeper:
    """The keeper of shared memory without a daemon: a service manager that stores descriptors, else a holder process."""
    store = fd_store()
    if store is not None:
        kept = FdStore(store.notify, store.inherited)
        if kept.has_room():
            return kept
        log.warning(
            "the service manager stores no descriptors for this service: a process of this service keeps staged saves, and "
            "they are lost if the service is ended as a whole while no daemon runs; set FileDescriptorStoreMax= in the unit"
        )
    return HolderProcess(_holder_path(root, config), _successor(root, config))


def _holder_path(root: ServedRoot, config: Config) -> Path:
    return holder_path(config.socket, root.place.directory, root.control.nodes.node)


def _successor(root: ServedRoot, config: Config) -> Start:
    """How to start a daemon that commits this one's staged saves, if it is killed and no other one comes."""
    state = ["--state", str(root.place.directory)] if root.place.bucket else []
    place = ["--root", root.place.label, *state]
    own = [*place, "--socket", str(config.socket.absolute()), "--exit-when-idle", str(SUCCESSOR_IDLE_S)]
    command = [sys.executable, "-m", "holdfast_service", *config.arguments, *own]
    return Start(command, os.getcwd(), successor_environment(), str(root.place.directory), root.identity.mark.id)
