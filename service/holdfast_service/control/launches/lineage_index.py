"""The lineage of every run's committed steps, read from their manifests; nothing here waits for SQL.

A manifest is read once, when its run is first queried. If there are many, the catalog's rows are used where it answers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from holdfast_files.opened import read_placement
from holdfast_formats import lineage, naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, CatalogUnavailable, CheckpointError, Damaged, NotFound
from holdfast_formats.lineage import Intent, Key, Way
from holdfast_service.control.catalog import lineage_records
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.lineage_records import ListedCheckpoint
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

LOOK_S = 2.0  # how long to wait for the catalog's facts
READ_MAX = 16  # manifests that are read without asking the catalog first


class LineageIndex:
    """The lineage of all runs of one root. Thread-safe."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        record_queue: RecordQueue,
        findings: Findings,
        attempts: Attempts,
        *,
        asks: bool = True,
    ) -> None:
        """Unless it `asks`, a save of a new step does not wait for the storage, which may be far away: publishing asks."""
        self._asks, self._attempts = asks, attempts
        self._store, self._catalog, self._record_queue, self._findings = store, catalog, record_queue, findings
        self._lock = threading.Lock()
        self._runs: dict[str, dict[int, ListedCheckpoint]] = {}
        self._copies: dict[tuple[str, int], Manifest] = {}  # of restored checkpoints that the root lacks
        self.copy_wanted: Signal[[str, int, list[Manifest]]] = Signal()  # a run's step; subscribers add that of a replica's
        self._begun: dict[str, Key] = {}

    def learn(self, run: str) -> None:
        """Read the run's directories now, so that no save has to."""
        self._there(run)

    def look_again(self, run: str, step: int) -> None:
        """Another node has published this checkpoint, perhaps replacing one that is cached here."""
        with self._lock:
            self._runs.get(run, {}).pop(step, None)

    def copy(self, run: str, step: int) -> Manifest | None:
        """The manifest of this step in a replica; None if none of those that can be reached has it."""
        found: list[Manifest] = []
        self.copy_wanted.publish(run, step, found)
        return found[0] if found else None

    def restored(self, copy: Manifest, attempt: int) -> None:
        """A launch restores this checkpoint, which only a replica has: what it saves continues from there, also after a
        restart of the daemon, and no save waits for the replica.
        """
        self._attempts.continues(copy.run, attempt, copy)
        with self._lock:
            self._copies[copy.run, copy.step] = copy

    def restored_copy(self, run: str, step: int) -> Manifest | None:
        """What a launch restores out of a replica; None if the root has a checkpoint of the step, or no replica has."""
        if roots.stands(self._store.files, run, step):
            return None
        known = self._copies.get((run, step))
        return self.copy(run, step) if known is None else known

    def forget(self, run: str) -> None:
        with self._lock:
            self._copies = {of: copy for of, copy in self._copies.items() if of[0] != run}
            self._runs.pop(run, None)
            self._begun.pop(run, None)

    def start_launch(self, run: str, launch: Key) -> None:
        """A launch restores: earlier launches may have replaced checkpoints through other nodes."""
        with self._lock:
            if launch > self._begun.get(run, (0, 0)):
                self._begun[run] = launch
                self._runs.pop(run, None)

    def add(self, manifest: Manifest) -> None:
        """A checkpoint was published, perhaps replacing another one."""
        listed_checkpoint = ListedCheckpoint(
            manifest.step, manifest.attempt, manifest.turn, manifest.rewinds, groups=manifest.groups
        )
        with self._lock:
            self._runs.setdefault(manifest.run, {})[manifest.step] = listed_checkpoint

    def launch(self, run: str, step: int) -> Key | None:
        """Which launch, by attempt and turn, made the checkpoint of this step; None where there is no sound one."""
        if not roots.stands(self._store.files, run, step):
            return None
        placed = next((c for c in self._there(run) if c.step == step), None)
        return (placed.attempt, placed.turn) if placed is not None and placed.sound else None

    def groups(self, run: str, step: int) -> tuple[str, ...]:
        """The groups of the checkpoint of this step; none where it is missing or unreadable."""
        return next((tuple(c.groups) for c in self._there(run) if c.step == step), ())

    def abandoned(self, run: str) -> set[int]:
        return lineage.abandoned(self._there(run))

    def leaves(self, manifest: Manifest) -> bool:
        """Whether this checkpoint, which is elsewhere, does not lead to the present state, here or of another root."""
        here = lineage.way([*self._there(manifest.run), manifest])
        living = max(here, self._attempts.elsewhere(manifest.run).way, key=lineage.line)
        return bool(living) and not lineage.is_on(living, manifest)

    def rewinds(self, run: str) -> Way:
        """The rewinds to the live line."""
        return lineage.way(self._there(run))

    def place(self, run: str, step: int, attempt: int, intent: Intent) -> lineage_records.SavePlace:
        """The place of a save of this intent; `AlreadyCommitted` where it may not be saved."""
        steps = self._there(run) if self._asks or step in self._runs.get(run, {}) else self._known(run)
        steps += self._elsewhere(run, attempt, intent.restored, steps)
        at = next((number for number, placed in enumerate(steps) if placed.step == step), None)
        if at is not None and not roots.stands(self._store.files, run, step):
            steps[at] = steps[at]._replace(sound=False)
        elsewhere = self._attempts.elsewhere(run)
        try:
            return lineage_records.place(steps, run, (step, attempt), intent, elsewhere)
        except AlreadyCommitted:  # unless an existing one is damaged or unhealthy: only this needs SQL
            if at is None:
                raise
            steps[at] = self._judged(run, steps[at])
            return lineage_records.place(steps, run, (step, attempt), intent, elsewhere)

    def _elsewhere(
        self, run: str, attempt: int, restored: int | None, steps: Sequence[ListedCheckpoint]
    ) -> list[ListedCheckpoint]:
        """What a launch continues from, if only a replica has it, until the launch has a checkpoint of its own."""
        if restored is None or any(restored == c.step or attempt == c.attempt for c in steps):
            return []
        copy = self._attempts.continued(run, attempt, restored)
        return [] if copy is None else [copy]

    def _judged(self, run: str, listed_checkpoint: ListedCheckpoint) -> ListedCheckpoint:
        """With the catalog's facts about a checkpoint; without the catalog it counts as good."""
        seen = self._findings.seen(run, listed_checkpoint.step)
        try:
            known = self._record_queue.query(lambda: self._catalog.checkpoint(run, listed_checkpoint.step), LOOK_S)
        except (CatalogUnavailable, NotFound) as error:
            log.info("cannot read what the catalog knows about %s@%s: %s", run, listed_checkpoint.step, error.detail)
            return listed_checkpoint._replace(sound=listed_checkpoint.sound and seen is None)
        if (known.attempt, known.turn) != (listed_checkpoint.attempt, listed_checkpoint.turn):
            return listed_checkpoint._replace(sound=listed_checkpoint.sound and seen is None)
        return listed_checkpoint._replace(sound=known.damage is None, healthy=known.healthy)

    def _known(self, run: str) -> list[ListedCheckpoint]:
        """As last read, by step."""
        with self._lock:
            return [one for _, one in sorted(self._runs.get(run, {}).items())]

    def _there(self, run: str) -> list[ListedCheckpoint]:
        """The checkpoints in the directory, by step."""
        steps = self._store.steps(run)
        with self._lock:
            known = self._runs.setdefault(run, {})
            for gone in known.keys() - set(steps):
                del known[gone]
            unknown = [step for step in steps if step not in known]
        read = self._read(run, unknown)
        with self._lock:
            for placed in read:
                known.setdefault(placed.step, placed)
            return [known[step] for step in steps if step in known]

    def _read(self, run: str, steps: Sequence[int]) -> list[ListedCheckpoint]:
        listed: dict[int, ListedCheckpoint] = {}
        if len(steps) > READ_MAX:
            try:
                listed = {found.step: found for found in self._record_queue.query(lambda: self._catalog.lines(run), LOOK_S)}
            except (CatalogUnavailable, NotFound) as error:
                log.info("reading the manifests of %s instead: %s", run, error.detail)
        found = []
        for step in steps:
            try:
                found.append(listed[step] if step in listed and listed[step].sound else self._placed(run, step))
            except NotFound:
                continue  # removed at this moment
            except Damaged:
                found.append(ListedCheckpoint(step, 0, 0, (), sound=False))
            except CheckpointError as error:
                log.warning("cannot read %s@%s: %s", run, step, error.detail)
                found.append(ListedCheckpoint(step, 0, 0, ()))
        return found

    def _placed(self, run: str, step: int) -> ListedCheckpoint:
        directory = naming.checkpoint_path(run, step)
        placed = read_placement(self._store.files, directory)
        return ListedCheckpoint(step, placed.attempt, placed.turn, placed.rewinds, groups=placed.groups)
