"""The parts that know a root and decide about its checkpoints, constructed in the order of their dependencies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.catalog.statistics import StatisticsStore
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.checkpoints.run_metadata import RunMetadata
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.findings.health import HealthRecords
from holdfast_service.control.insight import run_figures
from holdfast_service.control.launches.lineage_index import LineageIndex
from holdfast_service.control.nodes import THINNING, UPKEEP, Nodes, changing, deciding
from holdfast_service.control.retention.admission import Admission
from holdfast_service.control.retention.empty_runs import EmptyRuns
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.run_renaming import RunRenaming
from holdfast_service.control.retention.run_trash import RunTrash
from holdfast_service.control.retention.thinning import Thinning
from holdfast_service.control.root_watch import RootWatch
from holdfast_service.control.signals import Signal
from holdfast_service.storage import PosixStore, Store, Tier


@dataclass(frozen=True)
class RecordParts:
    """The known state of a root, and its records."""

    tier: Tier
    store: Store
    catalog: Catalog
    nodes: Nodes  # whose daemons serve the root with the same catalog
    returned: Signal[[]]  # the catalog answers, for the first time or again
    published: Signal[[Manifest]]  # saved or imported; subscribers must not block
    record_queue: RecordQueue
    events: Events
    attempts: Attempts
    rounds: Rounds
    statistics: StatisticsStore
    health: HealthRecords
    files: RunFiles
    run_metadata: RunMetadata
    absences: roots.NegativeCache


@dataclass(frozen=True)
class CheckpointParts(RecordParts):
    """The root's checkpoints, and the decisions about them."""

    readers: Readers
    rotation: Rotation
    findings: Findings
    lineage_index: LineageIndex
    empty_runs: EmptyRuns
    trash: RunTrash
    renaming: RunRenaming
    admission: Admission
    thinning: Thinning
    watch: RootWatch


def record_parts(tier: Tier, catalog: Catalog, nodes: Nodes, usual: RetentionPolicy) -> RecordParts:
    """`usual` is in force for runs without a policy of their own."""
    returned: Signal[[]] = Signal()
    record_queue = RecordQueue(catalog.database, returned.publish, partial(run_figures.renew, catalog.database))
    attempts = nodes.attempts(tier)
    events = Events(catalog.database, catalog.node or "node", utc_now, record_queue.enqueue)
    statistics = StatisticsStore(catalog.database)
    files = RunFiles(
        tier,
        usual,
        is_run=attempts.has,
        has_saved=lambda run: catalog.has_saved(run, attempts.newest(run)),
        elsewhere=lambda run: nodes.locked(changing(run)),
    )
    return RecordParts(
        tier=tier,
        store=PosixStore(tier),
        catalog=catalog,
        nodes=nodes,
        returned=returned,
        published=Signal(),
        record_queue=record_queue,
        events=events,
        attempts=attempts,
        rounds=Rounds(catalog, record_queue, utc_now),
        statistics=statistics,
        health=HealthRecords(tier, statistics, events),
        files=files,
        run_metadata=RunMetadata(tier, catalog, files, events),
        absences=roots.NegativeCache(nodes.names_s),
    )


def checkpoint_parts(records: RecordParts, trash_days: float | None) -> CheckpointParts:
    """Deleted runs can be restored for `trash_days`."""
    tier, store, catalog, nodes = records.tier, records.store, records.catalog, records.nodes
    record_queue, events, attempts, files = records.record_queue, records.events, records.attempts, records.files
    readers = Readers(shared=nodes.holds)
    rotation = Rotation(
        store,
        catalog,
        files,
        readers,
        events,
        lambda run, insists: nodes.locked(deciding(run), insists=insists),
    )
    findings = Findings(catalog, events, record_queue, utc_now, rotation.due, rotation.probe)
    lineage_index = LineageIndex(store, catalog, record_queue, findings)
    trash = RunTrash(
        tier, store, catalog, attempts, rotation, events, record_queue.enqueue, lineage_index.forget, trash_days
    )
    thinning = Thinning(store, catalog, record_queue, rotation, events, lineage_index.add, partial(nodes.has, THINNING))
    return CheckpointParts(
        **parts_of(records),
        readers=readers,
        rotation=rotation,
        findings=findings,
        lineage_index=lineage_index,
        empty_runs=EmptyRuns(tier, catalog, attempts, files, events),
        trash=trash,
        renaming=RunRenaming(tier, catalog, attempts, rotation, trash, events, lineage_index.forget, is_alone=nodes.alone),
        admission=Admission(tier, catalog, files, rotation, record_queue.query, trash.make_room),
        thinning=thinning,
        watch=RootWatch(
            store,
            catalog,
            rotation,
            findings,
            events,
            records.absences,
            thinned=thinning.record,
            replaced=lineage_index.look_again,
            is_mine=partial(nodes.has, UPKEEP),
        ),
    )


def parts_of(parts: RecordParts) -> dict[str, Any]:
    """The parts by name, for a larger record that includes them."""
    return {field.name: getattr(parts, field.name) for field in fields(parts)}
