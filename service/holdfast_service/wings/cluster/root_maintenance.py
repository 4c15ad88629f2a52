"""Maintenance of a root that several nodes serve: one of them, on duty, does this work for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError
from holdfast_formats.rest import bodies
from holdfast_formats.timestamps import span, utc_now
from holdfast_service.control.checkpoints import removal, replicas, roots
from holdfast_service.control.control import Control
from holdfast_service.control.jobs.staged import wanted_places
from holdfast_service.control.nodes import deciding
from holdfast_service.control.recovery import sweep
from holdfast_service.wings.cluster.cluster import Cluster

log = logging.getLogger(__name__)

LOOKS = 5  # for a checkpoint in another one's place: a network file system may show the old one for a minute and a half
IDLE_S = 3600.0  # no process writes any more to what is unchanged for so long, by the storage's clock

OFTEN_S = 60.0  # a root that may be looked at so often is looked at each time


class Looked(NamedTuple):
    """The last look after the root: when (monotonic), and how many runs there were."""

    at: float
    runs: int


class RootMaintenance:
    """The work that one node of a cluster does for all, while it has the duty. For one thread."""

    def __init__(self, control: Control, cluster: Cluster) -> None:
        self._tier, self._store, self._catalog = control.records, control.store, control.catalog
        self._cluster, self._events, self._due = cluster, control.events, control.rotation.due
        self._reconcile = control.recovery.reconcile
        self._looks, self._looked = control.storage.looks, Looked(float("-inf"), 0)
        self._disagreed: set[str] = set()  # runs of which another list stands in the catalog than in the root
        self._doubtful: dict[tuple[str, int], int] = {}  # steps that a lost node was saving: looks to go
        self._missing: set[str] = set()  # runs without ranks at any node and without a recorded end

    def run_once(self, idle_s: float = IDLE_S) -> None:
        """Look after the catalog, and after the root: to look at a bucket costs requests, so it is done less often."""
        self._look_after_catalog()
        every_s = min(self._looks.every_s(self._looked.runs), IDLE_S)
        if every_s <= OFTEN_S or time.monotonic() - self._looked.at >= every_s:
            runs = self._look_after_root(idle_s)
            self._looked = Looked(time.monotonic(), runs)

    def _look_after_root(self, idle_s: float) -> int:
        """Sweep what was not written to for `idle_s`, list committed checkpoints that are not listed, and apply policies.
        Returns the number of runs.
        """
        spared = [*wanted_places(self._catalog.database, self._store.files), *self._cluster.rounds.places()]
        sweep(self._store, spared, idle_s, lambda run: self._cluster.locked(deciding(run)))
        members = self._cluster.membership.members()
        removal.sweep_nodes(self._tier, {member.name for member in members})
        runs = roots.runs(self._tier)
        self._list_what_is_there(runs)
        for run in runs:
            self._due(run)
        return len(runs)

    def _look_after_catalog(self) -> None:
        """End the saves of nodes that are gone, and mark runs as dead with their node."""
        self._note_lost_nodes()
        self._end_saves()
        self._list_replacements()
        self._note_dead()
        for run, step in self._cluster.rounds.end_abandoned():
            log.warning("%s@%s was not saved: all its nodes were lost", run, step)
        self._cluster.rounds.forget()

    def _list_what_is_there(self, runs: Iterable[str]) -> None:
        """A node may be lost between a commit and its catalog entry. A difference seen only once is probably still being
        recorded.
        """
        disagreed = {run for run in runs if not roots.agrees(self._store, self._catalog, run)}
        if disagreed & self._disagreed:
            for run, step, problem in self._reconcile():
                log.error("cannot read %s@%s: %s", run, step, problem.detail)
        self._disagreed = disagreed

    def _end_saves(self) -> None:
        why = "the node saving it is gone"
        for ended in self._catalog.rounds.abort_of_lost_nodes(utc_now(), "round-aborted", why):
            text = f"step {ended.step} was not saved: {why}"
            log.warning("%s: %s (node %s)", ended.run, text, ended.node)
            self._events.add("save-aborted", text, ended.run, ended.step, level="warning")
            self._doubtful[ended.run, ended.step] = LOOKS

    def _list_replacements(self) -> None:
        """A node may be lost after it has replaced a checkpoint and before it has recorded that: the catalog would describe
        the new one by the old one's results.
        """
        for run, step in list(self._doubtful):
            self._doubtful[run, step] -= 1
            if self._list_replacement(run, step) or not self._doubtful[run, step]:
                del self._doubtful[run, step]

    def _list_replacement(self, run: str, step: int) -> bool:
        try:
            stated = bodies.describe(roots.load_manifest(self._store.files, run, step))
            known = self._catalog.checkpoint(run, step)
        except CheckpointError:  # missing, unlisted or unreadable: reported by other checks
            return False
        if (stated.attempt, stated.created) <= (known.attempt, known.created):
            return False  # this node may still see the old one
        log.warning("%s@%s was replaced by a node that is now lost", run, step)
        self._catalog.record_checkpoint(stated, roots.stamp(self._store, run, step))
        with self._catalog.database.write() as session:
            replicas.removed(session, run, step)
        return True

    def _note_lost_nodes(self) -> None:
        for member in self._cluster.membership.newly_lost():
            text = f"the node {member.name} is lost: last heard from {span(member.heard_s)} ago"
            log.warning("%s", text)
            self._events.add("node-lost", text, level="warning", name=member.name, host=member.about.get("host"))

    def _note_dead(self) -> None:
        """Runs whose ranks were not connected to any node, twice in a row, and without a recorded end."""
        noted = self._catalog.lives()
        missing = {run for run, (_, life, _) in noted.items() if life == "running"} - self._cluster.node_ranks.connected()
        for run in missing & self._missing:
            attempt, at = noted[run][0], utc_now()
            self._catalog.note_life(run, attempt, "died", at)
            text = f"attempt {attempt} died: its ranks disappeared with their node"
            self._events.add("run-died", text, run, level="error", attempt=attempt)
        self._missing = missing
