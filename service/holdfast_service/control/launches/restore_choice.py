"""What a launch restores: one answer for all its ranks, from the catalog, or from the directories while that is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, NoSuchCheckpoint, NoSuchRun, StateMismatch
from holdfast_formats.lineage import line
from holdfast_formats.restore_refusals import lacking
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.findings.checks import Findings, as_damage
from holdfast_service.control.findings.health import HealthRecords
from holdfast_service.control.launches.lineage_index import LineageIndex
from holdfast_service.control.launches.missing_checkpoints import FoundCopies, LostCheckpoints
from holdfast_service.control.launches.restore_copies import RestoreCopies
from holdfast_service.control.nodes import Nodes
from holdfast_service.control.signals import Signal
from holdfast_service.observe.tracing import span
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

RESTORE_MAX_S = 3600.0  # a launch that has restored and neither saved nor parted since reads no longer than this
SEEN_POLL_S = 0.5
MENDED_MAX = 8  # damaged checkpoints that a restore has mended first
ANSWER_S = 10.0  # after this wait for the catalog the directories are read


class RestoreQuestion(NamedTuple):
    """The `turn`-th question of an attempt: for a `step`, else the newest one with these groups, or the newest `healthy`
    one.
    """

    run: str
    attempt: int
    turn: int
    step: int | None
    groups: Collection[str] = ()
    healthy: bool = False
    in_root: bool = False  # not out of a copy


class Known(NamedTuple):
    """Sources of facts. `relist` compares the list of a run with its directories."""

    health: HealthRecords
    findings: Findings
    readers: Readers
    lineage_index: LineageIndex
    relist: Callable[[str], object]
    absences: roots.NegativeCache


class RestoreSelector:
    """Answers the questions of all launches. Thread-safe."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        store: Store,
        catalog: Catalog,
        attempts: Attempts,
        record_queue: RecordQueue,
        events: Events,
        known: Known,
        nodes: Nodes,
    ) -> None:
        self._store, self._catalog, self._attempts = store, catalog, attempts
        self._record_queue, self._events, self._nodes = record_queue, events, nodes
        self._health, self._findings, self._readers = known.health, known.findings, known.readers
        self._lineage_index, self._relist, self._absences = known.lineage_index, known.relist, known.absences
        # A run, attempt and turn would skip a checkpoint that is damaged in this way, or gone. Subscribers repair it and
        # wait for that, or raise.
        self.skipping: Signal[[tuple[str, int, int], int, Damaged | None]] = Signal()
        self.copies_wanted: Signal[[str, FoundCopies]] = Signal()  # of a run; subscribers add what they find
        self._choosing = threading.Lock()
        self._restored: dict[tuple[str, int], int] = {}  # (run, attempt) -> the step that its ranks read
        self.copies = RestoreCopies(catalog, attempts, known.lineage_index, known.readers)
        self.lost = LostCheckpoints(catalog, self._copies)

    def choose(  # noqa: PLR0913 - each is one thing
        self,
        run: str,
        attempt: int,
        turn: int,
        step: int | None,
        groups: Collection[str],
        healthy: bool = False,
        in_root: bool = False,
    ) -> int | None:
        """The step that every rank of this attempt restores as its `turn`-th; None when there is nothing to restore. It may
        be one that only `copies` have, or have sound, unless it is to be `in_root`.

        Unless a step is named it is the newest one that is not known to be damaged. Where all are, the damage of the newest
        is raised, and `StateMismatch` where the sound ones lack one of the groups, so that no launch starts from nothing
        without asking to; also where a step is named and another rank got another answer. For a healthy one:
        `NoSuchCheckpoint` where only others exist, `CatalogUnavailable` where the catalog is needed.
        """
        if not self._nodes.alone:
            self._lineage_index.start_launch(run, (attempt, turn))
        asked = RestoreQuestion(run, attempt, turn, step, groups, healthy, in_root)
        with span("holdfast.restore", {"holdfast.run": asked.run, "holdfast.attempt": asked.attempt}) as tell:
            self._await_seen(asked)  # not under the lock: other runs do not wait for it
            copy = self._have_mended(asked)
            with self._choosing:
                chosen = self._chosen(asked, copy)
            if asked.in_root and chosen is not None:
                self._bring(asked, chosen)
            tell(**{"holdfast.step": chosen})
        if asked.step is not None and chosen != asked.step:
            other = "found nothing to restore" if chosen is None else f"restores step {chosen}"
            raise StateMismatch(
                f"this rank restores step {asked.step} of {asked.run}, but another rank of its launch {other}",
                hint="every rank must call restore() with the same step",
            )
        return chosen

    def _bring(self, asked: RestoreQuestion, step: int) -> None:
        """Copy a step back to the root, and wait for that: `DeadlineExceeded` while it is in progress. `NoSuchCheckpoint` if
        it cannot be.
        """
        if roots.stands(self._store.files, asked.run, step):
            return
        self.skipping.publish((asked.run, asked.attempt, asked.turn), step, None)
        if not roots.stands(self._store.files, asked.run, step):
            raise NoSuchCheckpoint(
                f"{asked.run}@{step} is not in the root, and could not be copied back to it", hint="see the daemon's log"
            )

    def _copies(self, run: str) -> FoundCopies:
        found = FoundCopies({}, {})
        self.copies_wanted.publish(run, found)
        return found

    def parted(self, run: str, attempt: int) -> None:
        """The ranks of this attempt read what they restored no more."""
        if self._release(run, attempt):
            self._nodes.changed()

    def _release(self, run: str, attempt: int) -> bool:
        step = self._restored.pop((run, attempt), None)
        if step is not None:
            self._readers.release(run, step, f"attempt {attempt}")
        return step is not None

    def _chosen(self, asked: RestoreQuestion, copy: Manifest | None) -> int | None:
        run, attempt, turn = asked[:3]
        known, answer = self._attempts.asked(run, attempt, turn)
        if known:
            return answer
        if copy is not None and self.copies.hold(copy, f"attempt {attempt}", RESTORE_MAX_S):
            self._lineage_index.restored(copy, attempt)
            step: int | None = copy.step
        else:
            step = self._from_root(asked)
        chosen = self._attempts.answer(run, attempt, turn, step)
        self._record_queue.enqueue("which step a launch restores", lambda: self._note(asked, chosen))
        if chosen is not None:
            self._release(run, attempt)
            self._restored[run, attempt] = chosen
            self._readers.hold(run, chosen, f"attempt {attempt}", RESTORE_MAX_S)
            self._events.enqueue("restore-chosen", f"attempt {attempt} restores step {chosen}", run, chosen, attempt=attempt)
        return chosen

    def _from_root(self, asked: RestoreQuestion) -> int | None:
        try:
            found = self._record_queue.query(lambda: self._listed(asked), ANSWER_S)
        except CatalogUnavailable as away:
            if asked.healthy:
                raise
            log.warning("attempt %s of %s restores from the directory listing: %s", asked.attempt, asked.run, away.detail)
            found = self._in_directories(asked)
        if found is None and asked.attempt > 1:
            self._confirm_none(asked)
        return found

    def _confirm_none(self, asked: RestoreQuestion) -> None:
        """Raise unless the catalog, up to date, says that nothing of a run with earlier launches is missing: it alone knows
        what was there, and what is gone is delisted before that is recorded.
        """
        try:
            if not self._record_queue.recorded(ANSWER_S):
                raise CatalogUnavailable("the catalog is not up to date")
            self._record_queue.query(lambda: self._relist(asked.run), ANSWER_S)  # after another thread that does so
            self._record_queue.query(lambda: self._listed(asked), ANSWER_S)
        except CatalogUnavailable as away:
            raise CatalogUnavailable(
                f"{asked.run}, which is at attempt {asked.attempt}, has no checkpoint in the root, and the catalog does not "
                f"say whether some are missing: {away.detail}",
                hint="start again once the catalog answers (`holdfast nodes` says so); another run name begins at once",
            ) from away

    def _await_seen(self, asked: RestoreQuestion) -> None:
        """Wait until checkpoints that other nodes have published are visible here, or have been missing for long enough: the
        step, and the run's others, which decide where this launch continues.
        """
        limit = time.monotonic() + self._absences.patience_s
        while time.monotonic() < limit:
            known, step = self._attempts.asked(*asked[:3])
            try:
                if not known:
                    step = self._record_queue.query(lambda: self._listed(asked), ANSWER_S)
                listed = self._record_queue.query(lambda: self._catalog.lines(asked.run), ANSWER_S)
            except CheckpointError:  # it is raised again when there is nothing to wait for
                listed = []
            hidden = {found.step for found in listed} - set(self._store.steps(asked.run))
            if step is not None and not roots.stands(self._store.files, asked.run, step):
                hidden.add(step)
            if not hidden:
                return
            log.info("%s@%s is listed but not visible here yet: waiting", asked.run, min(hidden))
            time.sleep(SEEN_POLL_S)

    def _have_mended(self, asked: RestoreQuestion) -> Manifest | None:
        """Repair damaged checkpoints that would be skipped, the newest first, until one is sound; without any, the newest
        one in a replica is copied back. `DeadlineExceeded` while that is in progress.

        If a copy can be read at once, its manifest, and the rest is done behind the restore. Not where several daemons share
        the root: another one would not know what its ranks continue from. Nor below damaged copies: later restores begin
        with what is taken instead of them because the root has it.
        """
        tried: set[int] = set()
        while len(tried) < MENDED_MAX and not self._attempts.asked(*asked[:3])[0]:
            try:
                found = self._record_queue.query(lambda: self._mendable(asked, tried), ANSWER_S)
            except (CatalogUnavailable, NoSuchRun):
                return None
            if found is None:
                return None
            at_once = self._nodes.alone and not asked.healthy and found[0] > max(self.lost.damaged(asked.run), default=-1)
            if at_once and (copy := self.copies.readable(asked.run, found[0], asked.groups)):
                self.copies.behind.publish(asked.run, *found)
                return copy
            tried.add(found[0])
            self.skipping.publish((asked.run, asked.attempt, asked.turn), *found)
        return None

    def _mendable(self, asked: RestoreQuestion, tried: Collection[int]) -> tuple[int, Damaged | None] | None:
        """What to repair first, and its damage; None as damage for one that is gone, or is in a tier alone."""
        run = asked.run
        if not roots.agrees(self._store, self._catalog, run):
            self._relist(run)
        listed = roots.all_checkpoints(self._catalog, run)
        if asked.step is not None:
            there = {made.step for made in listed}
            return (
                None if asked.step in there | {*tried} or asked.step not in self.lost.recorded(run) else (asked.step, None)
            )
        newest = self._catalog.newest(run, asked.groups)
        for made in listed:  # newest first
            damage = as_damage(made.damage)
            if damage is not None and not made.abandoned and made.step not in tried and made.step > (newest or -1):
                return made.step, damage
        if listed:
            return self._newer_copy(run, max(made.step for made in listed), tried)
        copies = set() if tried else {step for held in self.lost.copies(run).values() for step in held}
        found = self._newest_leading(run, copies)
        if found is None or max(self.lost.damaged(run), default=-1) > found:
            return None  # an older one instead would be chosen in silence
        return found, None

    def _newest_leading(self, run: str, copies: Collection[int]) -> int | None:
        """The newest of these steps, which only replicas have, that leads to the present state. None also where a newer one
        cannot be read now, so that its line is not known: it may be one that training has left.
        """
        for step in sorted(copies, reverse=True):
            found = self._lineage_index.copy(run, step)
            if found is None:
                return None if self._attempts.elsewhere(run).way else step
            if not self._lineage_index.leaves(found):
                return step
        return None

    def _newer_copy(self, run: str, newest: int, tried: Collection[int]) -> tuple[int, None] | None:
        """The newest step after `newest` that only a replica has and that leads to the present state. `CheckpointsMissing`
        for one of an attempt that this root does not know.
        """
        for step in sorted(self.lost.recorded(run) - {*tried}, reverse=True):
            if step <= newest:
                break
            found = self._lineage_index.copy(run, step)
            if found is not None and not self._lineage_index.leaves(found):
                if found.attempt > self._attempts.newest(run):
                    raise self.lost.of_another_root(run, step)
                return step, None
        elsewhere = self._attempts.elsewhere(run).way
        if line(elsewhere) > line(self._lineage_index.rewinds(run)) and newest > elsewhere[-1].step:
            raise self.lost.left_behind(run, newest, elsewhere[-1])
        return None

    def _note(self, asked: RestoreQuestion, chosen: int | None) -> None:
        self._catalog.answer(asked.run, asked.attempt, asked.turn, chosen)

    def _listed(self, asked: RestoreQuestion) -> int | None:
        """The catalog's answer, once it matches the directories. `CatalogUnavailable` where it lacks this launch's run: it
        is behind.
        """
        run, step = asked.run, asked.step
        try:
            if not roots.agrees(self._store, self._catalog, run):
                self._relist(run)
        except NoSuchRun as behind:
            raise CatalogUnavailable(f"the run {run!r} is not in the catalog yet", hint="try again") from behind
        if step is not None:
            try:
                self._catalog.checkpoint(run, step)
            except NoSuchCheckpoint as error:
                raise self.lost.unread(run, step) or error from None
            return step
        found = self._health.newest(run, asked.groups) if asked.healthy else self._catalog.newest(run, asked.groups)
        if found is None:
            self._refuse_if_none_will_do(run, asked.groups)
        return found

    def _in_directories(self, asked: RestoreQuestion) -> int | None:
        """As the directories have it: the newest whose manifest is sound, and of which no damage was seen here."""
        run, step = asked.run, asked.step
        steps = roots.committed(self._store, run)
        if step is not None:
            if step not in steps:
                raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"available steps: {steps[-10:]}")
            return step
        damage: Damaged | None = None
        offers: dict[int, Collection[str]] = {}
        left = self._lineage_index.abandoned(run)
        for found in reversed([there for there in steps if there not in left]):
            seen = self._findings.seen(run, found)
            try:
                if seen is None:
                    offers[found] = roots.load_manifest(self._store.files, run, found).groups
                    if set(asked.groups) <= set(offers[found]):
                        return found
            except Damaged as error:
                seen = error
            except NoSuchCheckpoint:
                continue  # removed at this moment
            damage = damage or seen
        if damage is not None:
            raise damage
        if offers:
            raise lacking(run, offers, asked.groups)
        self.lost.refuse(run)
        return None

    def _refuse_if_none_will_do(self, run: str, groups: Collection[str]) -> None:
        """Raise if only damaged checkpoints exist, or sound ones without one of these groups."""
        listed = roots.all_checkpoints(self._catalog, run)
        found = [checkpoint for checkpoint in listed if checkpoint.damage is not None]
        sound = {checkpoint.step: checkpoint.groups for checkpoint in listed if checkpoint.damage is None}
        if sound and not any(set(groups) <= set(checkpoint.groups) for checkpoint in found):
            raise lacking(run, sound, groups)
        hint = f"no sound checkpoint of {run} is left; remove the damaged ones (`holdfast rm`) to start from scratch"
        damage = as_damage({**(found[0].damage or {}), "hint": hint}) if found else None
        if damage is not None:
            raise damage
        self.lost.refuse(run)
