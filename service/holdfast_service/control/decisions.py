"""Control as the daemon sees it: the few calls in which it asks what to do. Bytes of tensors never come here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Literal

from holdfast_formats import naming, rest
from holdfast_formats.errors import CheckpointError, Damaged, GenerationDropped, NotFound, StorageFailed
from holdfast_formats.manifest import Manifest
from holdfast_formats.plan import Plan
from holdfast_formats.statistics import Statistics
from holdfast_formats.table import SlotTable
from holdfast_service.storage import Tier
from holdfast_service.tracing import span

from . import commit, planner, removal, roots
from .admission import Admission
from .catalog import Catalog
from .checks import Findings, as_damage
from .events import Events
from .health import Health
from .imports import Imports
from .readers import Readers
from .replicas import RepairBook, ReplicaBook
from .rotation import Rotation
from .run_files import RunFiles
from .statistics import StatisticsStore

log = logging.getLogger(__name__)

RESTORE_MAX_S = 3600.0  # a launch that has restored and neither saved nor parted since reads no longer than this


def utc_now() -> str:
    """The time now, RFC 3339, UTC, in milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Decisions:
    """Attempts, rounds, commits and removals of one root. Thread-safe: the catalog serialises what must be."""

    def __init__(self, tier: Tier, catalog: Catalog, keep_last: int | None, node: str = "node") -> None:
        self._tier = tier
        self._catalog = catalog
        catalog.node = node
        self.events = Events(catalog.database, node, utc_now)
        self.statistics = StatisticsStore(catalog.database)
        self._health = Health(tier, self.statistics, self.events)
        self._keep_last = keep_last
        self._files = RunFiles(tier)
        self.readers = Readers()
        self.rotation = Rotation(tier, catalog, (self._files, self.readers))
        self.rotation.events = self.events
        self._declared: dict[str, int] = {}  # run -> the newest attempt that was told of
        self._declaring = threading.Lock()
        self.findings = Findings(catalog, self.events, utc_now, self.rotation.due)
        self._admission = Admission(tier, catalog, (self._files, self.rotation))
        self._restored: dict[tuple[str, int], int] = {}  # (run, attempt) -> the step that its ranks read

    def close(self) -> None:
        """Remove what is due, stop."""
        self.rotation.close()

    def recover(self, adopt: Callable[[], Collection[int]] = tuple) -> None:
        """At start: sweep what no commit ever published, make the catalog say what the directories say, end old rounds.

        Between the two, `adopt` takes up the rounds whose bytes an earlier daemon left in memory; it returns their ids.
        """
        self.events.skip_lost_ids()
        for path in removal.sweep(self._tier):
            log.info("swept %s", path)
        for run, step, problem in roots.reconcile(self._tier, self._catalog):
            log.error("%s@%s cannot be read: %s", run, step, problem.detail)
        for found in self._catalog.settle_committed_rounds(utc_now()):
            text = f"step {found.step} is committed; the daemon ended before it could say so"
            self.events.add("checkpoint-committed", text, found.run, found.step)
        why = "the daemon ended before this round was complete"
        self._catalog.abort_open_rounds(utc_now(), "round-aborted", why, keep=adopt())

    def hello(self, run: str, launch: str, world: int, keep_last: int | None) -> int:
        """The attempt number of this launch; the first rank of a launch declares it."""
        naming.check_run(run)
        attempt = self._declare(run, launch, world)
        try:
            before = self._files.read(run)
            wanted = keep_last if keep_last is not None else before.keep_last or self._keep_last
            file = self._files.change(run, lambda file: file.model_copy(update={"keep_last": wanted}))
            if file.policy is not None and keep_last not in (None, file.policy.last):
                log.info("%s: keep_last=%s of the trainer gives way to the run's policy", run, keep_last)
            if self._catalog.keep_last(run) != file.in_force.last:
                self._catalog.set_keep_last(run, file.in_force.last)
        except Damaged as error:  # training goes on; nothing of the run is removed until its file is mended
            log.error("%s", error)
        return attempt

    def declared(self, run: str, launch: str) -> bool:
        """Whether this launch has an attempt already."""
        return self._catalog.attempt_of(run, launch) is not None

    def _declare(self, run: str, launch: str, world: int) -> int:
        known = self._catalog.newest_attempt(run)
        attempt = self._catalog.declare_attempt(run, launch, world, utc_now())
        with self._declaring:
            new = attempt > max(known, self._declared.get(run, 0))
            self._declared[run] = max(attempt, self._declared.get(run, 0))
        if new:
            text = f"attempt {attempt} has begun, of {world} {'rank' if world == 1 else 'ranks'}"
            self.events.add("attempt-declared", text, run, attempt=attempt, world=world, launch=launch)
        return attempt

    def begin(self, run: str, step: int, attempt: int, world: int) -> int:
        """Open the round of this step, or find it open; `StaleAttempt` (I6) or `AlreadyCommitted` if it may not be."""
        return self._catalog.open_round(run, step, attempt, world, utc_now())

    def resume(self, run: str, step: int, attempt: int, world: int) -> int:
        """Go on with the round of an earlier daemon, or open it; refuses as `begin` does, but for I6: see the catalog."""
        return self._catalog.resume_round(run, step, attempt, world, utc_now())

    def committed(self, run: str, step: int) -> int | None:
        """The attempt that committed this step; None when it is no checkpoint."""
        try:
            return self._catalog.checkpoint(run, step).attempt
        except NotFound:
            return None

    def sealed(self, round_id: int, ranks: int) -> None:
        self._catalog.update_round(round_id, sealed=ranks)

    def plan(self, tables: Sequence[SlotTable]) -> Plan:
        return planner.plan(tables)

    def admit(self, plan: Plan) -> None:
        """Whether what is planned fits; `QuotaExceeded` or `NoSpace` with the numbers, before a byte of it is written."""
        self._admission.admit(plan)

    def commit(self, round_id: int, plan: Plan, measured: Mapping[str, float] | None = None) -> Manifest:
        """Publish, then record, with what was `measured` so far; when this returns the checkpoint may be announced.

        The directory is the truth: a failure to record it does not undo it, the next look at the directories repairs that.
        """
        began = time.monotonic()
        self.rotation.make_way(plan.run, plan.step)
        try:
            made = commit.publish(self._tier, plan, utc_now())
        except StorageFailed as error:
            if error.members.get("outcome") == "unknown":
                roots.reconcile(self._tier, self._catalog)
            raise
        known = {**(measured or {}), "commit_s": time.monotonic() - began, "bytes": float(made.bytes)}
        try:
            self._catalog.record_checkpoint(rest.describe(made), roots.stamp(self._tier, made.run, made.step))
            self._catalog.end_round(round_id, "committed", utc_now(), None, None, **known)
        except CheckpointError as error:
            log.error("%s@%s is committed, but the catalog does not know: %s", made.run, made.step, error.detail)
        text = f"step {made.step} is committed"
        self.events.add("checkpoint-committed", text, made.run, made.step, bytes=made.bytes, measured=known)
        self.parted(made.run, made.attempt)  # what all ranks have saved anew, all of them have restored
        return made

    def abort(
        self,
        round_id: int,
        error: CheckpointError,
        staging: str | None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """End a round without a checkpoint and remove what it staged; what cannot be removed now, the next sweep removes."""
        state: Literal["aborted", "dropped"] = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        ended = self._catalog.end_round(round_id, state, utc_now(), error.code, error.detail, **(measured or {}))
        if ended is not None:
            kind = "save-dropped" if state == "dropped" else "save-aborted"
            level: Literal["info", "warning"] = "info" if state == "dropped" else "warning"
            text = f"step {ended.step} was not saved: {error.detail}"
            self.events.add(kind, text, ended.run, ended.step, level, problem=error.problem())
        if staging is not None:
            try:
                self._tier.remove_tree(staging)
            except CheckpointError as failure:
                log.warning("%s stays until the next start: %s", staging, failure.detail)

    def measured(self, round_id: int, measured: Mapping[str, float]) -> None:
        """Note what was found out of a save since it ended."""
        self._catalog.measure_round(round_id, measured)

    def choose(
        self, run: str, attempt: int, turn: int, step: int | None, groups: Collection[str], healthy: bool = False
    ) -> int | None:
        """The step that every rank of this attempt restores as its `turn`-th; None when there is nothing to restore.

        Unless a step is named it is the newest one that is not known to be damaged. Where all are, the damage of the newest
        is raised: nobody starts from nothing because of it without being asked to. With `healthy`, it is the newest healthy
        one: `NoSuchCheckpoint` where there are others only.
        """
        with span("holdfast.restore", {"holdfast.run": run, "holdfast.attempt": attempt}) as tell:
            chosen = self._choose(run, attempt, turn, step, groups, healthy)
            tell(**{"holdfast.step": chosen})
        return chosen

    def _choose(
        self, run: str, attempt: int, turn: int, step: int | None, groups: Collection[str], healthy: bool
    ) -> int | None:
        known, answer = self._catalog.asked(run, attempt, turn)
        if known:
            return answer
        if not roots.agrees(self._tier, self._catalog, run):
            roots.reconcile(self._tier, self._catalog)
        if step is None:
            step = self._health.newest(run, groups) if healthy else self._catalog.newest(run, groups)
            if step is None:
                self._refuse_if_all_damaged(run)
        else:
            self._catalog.checkpoint(run, step)
        chosen = self._catalog.answer(run, attempt, turn, step)
        if chosen is not None:
            self.parted(run, attempt)
            self._restored[run, attempt] = chosen
            self.readers.hold(run, chosen, f"attempt {attempt}", RESTORE_MAX_S)
            self.events.add("restore-chosen", f"attempt {attempt} restores step {chosen}", run, chosen, attempt=attempt)
        return chosen

    def reading(self, run: str, step: int) -> AbstractContextManager[None]:
        """Nothing removes the checkpoint while the block reads it; `NoSuchCheckpoint` for one that is being removed."""
        return self.readers.reading(run, step, "the daemon")

    def _refuse_if_all_damaged(self, run: str) -> None:
        found = [checkpoint for checkpoint in roots.all_checkpoints(self._catalog, run) if checkpoint.damage is not None]
        damage = as_damage(found[0].damage) if found else None
        if damage is not None:
            damage.hint = f"no sound checkpoint of {run} is left; remove the damaged ones (holdfast rm) to begin anew"
            raise damage

    def replica_book(self) -> ReplicaBook:
        """What is known of copies in other tiers."""
        return ReplicaBook(self._tier, self._catalog, self.events)

    def imports(self) -> Imports:
        """How checkpoints from elsewhere are brought in."""
        return Imports(self._tier, self._catalog, self.events, self.admit)

    def repair_book(self) -> RepairBook:
        """Where repairs are recorded."""
        return RepairBook(self._tier, self._catalog, self.events)

    def is_examined(self, run: str, step: int) -> bool:
        """Whether there are statistics of this checkpoint."""
        return self.statistics.has(run, step)

    def before(self, run: str, step: int) -> Manifest | None:
        """The checkpoint that the changes of a new one are measured from; None when there is none."""
        return self._health.before(run, step)

    def examined(self, made: Manifest, found: Statistics) -> None:
        """What was found of a checkpoint's tensors while it was read back; comes before `verified`."""
        self._health.take(made, found)

    def parted(self, run: str, attempt: int) -> None:
        """The ranks of this attempt read what they restored no more."""
        step = self._restored.pop((run, attempt), None)
        if step is not None:
            self.readers.release(run, step, f"attempt {attempt}")
