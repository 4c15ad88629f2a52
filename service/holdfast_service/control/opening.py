"""Constructs all control parts of one root; the daemon calls each part by name.

Saves never wait for the catalog: attempts, saves and directories are known here, and the catalog is updated later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.imports import Imports
from holdfast_service.control.checkpoints.replicas import RepairRecords, ReplicaRecords
from holdfast_service.control.insight.known_lifecycles import KnownLifecycles
from holdfast_service.control.launch_registry import LaunchRegistry
from holdfast_service.control.launches.restore_choice import Known, Mending, RestoreSelector
from holdfast_service.control.launches.save_permits import SavePermits
from holdfast_service.control.nodes import ONE_NODE, Nodes
from holdfast_service.control.parts import CheckpointParts, checkpoint_parts, parts_of, record_parts
from holdfast_service.control.publishing import Publishing
from holdfast_service.control.recovered_saves import RecoveredSaves
from holdfast_service.control.recovery import Recovery
from holdfast_service.control.retention.requests import RetentionRequests
from holdfast_service.control.retention.run_trash import KEPT_DAYS
from holdfast_service.control.save_coordinator import SaveCoordinator
from holdfast_service.storage import Tier


@dataclass(frozen=True)
class Control(CheckpointParts):
    """The control parts of one root. Every call of a part either decides and records, or raises a named error and changes
    nothing.
    """

    recovery: Recovery
    wishes: RetentionRequests
    mending: Mending
    restores: RestoreSelector
    publishing: Publishing
    saves: SaveCoordinator
    launches: LaunchRegistry
    lives: KnownLifecycles
    staged_before: RecoveredSaves
    imports: Imports
    repairs: RepairRecords
    replicas: ReplicaRecords

    def writers(self) -> set[str]:
        """The nodes whose daemons are up, this one among them."""
        return {self.events.node, *(member.name for member in self.nodes.members() if member.live)}

    def close(self) -> None:
        """Remove what is due, write the remaining records to the catalog, stop."""
        self.rotation.close()
        self.record_queue.close()


def open_control(  # noqa: PLR0913 - each is one thing
    tier: Tier,
    catalog: Catalog,
    keep_last: int | None = None,
    nodes: Nodes = ONE_NODE,
    *,
    usual: RetentionPolicy | None = None,
    trash_days: float | None = KEPT_DAYS,
    claim: Callable[[], None] = lambda: None,
) -> Control:
    """`keep_last` and `usual` are in force for runs without a policy of their own. `claim` raises where a catalog that is
    back is another root's.
    """
    parts = checkpoint_parts(record_parts(tier, catalog, nodes, usual or RetentionPolicy()), trash_days)
    store, record_queue, attempts, events, lineage_index = (
        parts.store,
        parts.record_queue,
        parts.attempts,
        parts.events,
        parts.lineage_index,
    )
    mending = Mending()
    known = Known(parts.health, parts.findings, parts.readers, lineage_index, parts.watch.relist, parts.absences, mending)
    restores = RestoreSelector(store, catalog, attempts, record_queue, events, known, nodes)
    publishing = Publishing(parts, restores)
    recovery = Recovery(parts, claim)
    wishes = RetentionRequests(parts.files, catalog, record_queue, keep_last)
    permits = SavePermits(attempts, lineage_index, catalog, record_queue)
    return Control(
        **parts_of(parts),
        recovery=recovery,
        wishes=wishes,
        mending=mending,
        restores=restores,
        publishing=publishing,
        saves=SaveCoordinator(parts, permits, publishing, recovery, restores),
        launches=LaunchRegistry(parts, wishes, recovery, restores),
        lives=KnownLifecycles(attempts, catalog, record_queue, events.enqueue, shared=not nodes.alone),
        staged_before=RecoveredSaves(store, catalog, record_queue, parts.rounds, events),
        imports=Imports(store, catalog, events, parts.admission, lineage_index.rewinds, parts.published),
        repairs=RepairRecords(tier, catalog, events, record_queue, nodes),
        replicas=ReplicaRecords(tier, catalog, events),
    )
