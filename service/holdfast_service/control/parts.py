"""The parts that know a root and decide about its checkpoints, each constructed after what it needs."""

from __future__ import annotations

from functools import partial

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.catalog.statistics import StatisticsStore
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.awaited_copies import AwaitedCopies
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.checkpoints.run_metadata import RunMetadata
from holdfast_service.control.checkpoints.tiers import Tiers
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
from holdfast_service.control.retention.second_copies import SecondCopies
from holdfast_service.control.retention.thinning import Thinning
from holdfast_service.control.root_watch import RootWatch
from holdfast_service.control.signals import Signal
from holdfast_service.storage import RootStorage
from holdfast_service.storage.root_storage import Looks

SHARED_SHOWN_S = 10.0


class RecordParts:
    """The known state of a root, and its records."""

    def __init__(self, storage: RootStorage, catalog: Catalog, nodes: Nodes, usual: RetentionPolicy) -> None:
        """`nodes` serve the root with the same catalog; `usual` is in force for runs without a policy of their own."""
        self.storage, self.catalog, self.nodes = storage, catalog, nodes
        self.records, self.store = storage.records, storage.store
        self.returned: Signal[[]] = Signal()  # the catalog answers, for the first time or again
        self.published: Signal[[Manifest]] = Signal()  # saved or imported; subscribers must not block
        self.record_queue = RecordQueue(
            catalog.database, self.returned.publish, partial(run_figures.renew, catalog.database)
        )
        self.attempts = nodes.attempts(self.records)
        self.events = Events(catalog.database, catalog.node or "node", utc_now, self.record_queue.enqueue)
        catalog.told.subscribe(self.events.heard)
        self.rounds = Rounds(catalog.rounds, self.record_queue, utc_now)
        self.statistics = StatisticsStore(catalog.database)
        self.health = HealthRecords(self.records, self.statistics, self.events)
        self.files = RunFiles(
            self.records,
            usual,
            is_run=self.attempts.has,
            has_saved=lambda run: catalog.rounds.has_committed(run, self.attempts.newest(run)),
            elsewhere=lambda run: nodes.locked(changing(run)),
            shown_s=_shown_s(storage.looks, nodes),
        )
        self.run_metadata = RunMetadata(self.records, catalog, self.files, self.events)
        self.absences = roots.NegativeCache(nodes.names_s if storage.looks.late else 0.0)


def _shown_s(looks: Looks, nodes: Nodes) -> float:
    """How old a run's file may be that lists show. Reading one in a bucket is a request, and only other nodes change it."""
    if looks.at_files:
        return 0.0
    return looks.every_s(1) if nodes.alone else SHARED_SHOWN_S


class CheckpointParts(RecordParts):
    """The root's checkpoints, and the decisions about them."""

    def __init__(
        self, storage: RootStorage, catalog: Catalog, nodes: Nodes, usual: RetentionPolicy, trash_days: float | None
    ) -> None:
        """Deleted runs can be restored for `trash_days`."""
        super().__init__(storage, catalog, nodes, usual)
        records, store, record_queue, events = self.records, self.store, self.record_queue, self.events
        attempts, files = self.attempts, self.files
        self.readers = Readers(shared=nodes.holds)
        self.tiers = Tiers(catalog.database)
        self.awaited_copies = AwaitedCopies(catalog.database, self.tiers, nodes, record_queue)
        self.rotation = rotation = Rotation(
            store,
            catalog,
            files,
            self.readers,
            events,
            lambda run, insists: nodes.locked(deciding(run), insists=insists),
            self.tiers,
        )
        self.findings = Findings(catalog, events, record_queue, utc_now, rotation.due, rotation.probe)
        self.lineage_index = lineage = LineageIndex(
            store,
            catalog,
            record_queue,
            self.findings,
            attempts,
            asks=storage.looks.at_files,
        )
        self.empty_runs = EmptyRuns(records, catalog, attempts, files, events)
        self.trash = trash = RunTrash(
            records, store, catalog, attempts, rotation, events, record_queue.enqueue, lineage.forget, trash_days
        )
        self.renaming = RunRenaming(
            storage, catalog, attempts, rotation, trash, events, lineage.forget, is_alone=nodes.alone
        )
        self.admission = Admission(storage, catalog, files, rotation, record_queue.query, trash.make_room)
        self.thinning = Thinning(store, catalog, record_queue, rotation, events, lineage.add, partial(nodes.has, THINNING))
        self.second_copies = SecondCopies(store, catalog, rotation, self.admission, events)
        self.watch = RootWatch(
            store,
            catalog,
            rotation,
            self.findings,
            events,
            self.absences,
            looks=storage.looks,
            thinned=self.thinning.record,
            replaced=lineage.look_again,
            is_mine=partial(nodes.has, UPKEEP),
        )
