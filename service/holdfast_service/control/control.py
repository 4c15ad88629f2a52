"""Constructs all control parts of one root; the daemon calls each part by name.

Saves never wait for the catalog: attempts, saves and directories are known here, and the catalog is updated later.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.imports import Imports
from holdfast_service.control.checkpoints.replicas import RepairRecords, ReplicaRecords
from holdfast_service.control.insight.known_lifecycles import KnownLifecycles
from holdfast_service.control.launch_registry import LaunchRegistry
from holdfast_service.control.launches.restore_choice import Known, RestoreSelector
from holdfast_service.control.launches.save_permits import SavePermits
from holdfast_service.control.nodes import ONE_NODE, Nodes
from holdfast_service.control.parts import CheckpointParts
from holdfast_service.control.publishing import Publishing
from holdfast_service.control.recovered_saves import RecoveredSaves
from holdfast_service.control.recovery import Recovery
from holdfast_service.control.retention.requests import RetentionRequests
from holdfast_service.control.retention.run_trash import KEPT_DAYS
from holdfast_service.control.save_coordinator import SaveCoordinator
from holdfast_service.storage import RootStorage


class Control(CheckpointParts):
    """The control parts of one root. Every call of a part either decides and records, or raises a named error and changes
    nothing.
    """

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        storage: RootStorage,
        catalog: Catalog,
        keep_last: int | None = None,
        nodes: Nodes = ONE_NODE,
        *,
        usual: RetentionPolicy | None = None,
        trash_days: float | None = KEPT_DAYS,
        claim: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep_last` and `usual` are in force for runs without a policy of their own. `claim` raises where a catalog that
        is back is another root's.
        """
        super().__init__(storage, catalog, nodes, usual or RetentionPolicy(), trash_days)
        store, record_queue, events = self.store, self.record_queue, self.events
        attempts, lineage = self.attempts, self.lineage_index
        known = Known(self.health, self.findings, self.readers, lineage, self.watch.relist, self.absences)
        self.restores = RestoreSelector(store, catalog, attempts, record_queue, events, known, nodes)
        self.publishing = Publishing(self, self.restores)
        self.recovery = Recovery(self, claim)
        self.wishes = RetentionRequests(self.files, catalog, record_queue, keep_last)
        permits = SavePermits(attempts, lineage, catalog.rounds, record_queue)
        self.saves = SaveCoordinator(self, permits, self.publishing, self.recovery, self.restores)
        self.launches = LaunchRegistry(self, self.wishes, self.recovery, self.restores)
        self.lives = KnownLifecycles(attempts, catalog, record_queue, events.enqueue, shared=not nodes.alone)
        self.staged_before = RecoveredSaves(store, catalog.rounds, record_queue, self.rounds, events)
        self.imports = Imports(store, catalog, events, self.admission, lineage.rewinds, self.published)
        self.repairs = RepairRecords(storage, catalog, events, record_queue, nodes)
        self.replicas = ReplicaRecords(storage.records, catalog, events, attempts, self.readers)

    def writers(self) -> set[str]:
        """The nodes whose daemons are up, this one among them."""
        return {self.events.node, *(member.name for member in self.nodes.members() if member.live)}

    def close(self) -> None:
        """Remove what is due, write the remaining records to the catalog, stop."""
        self.rotation.close()
        self.record_queue.close()
