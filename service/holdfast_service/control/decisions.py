"""Control as the daemon sees it: the few calls in which it asks what to do. Bytes of tensors never come here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Literal

from holdfast_formats import naming, rest
from holdfast_formats.errors import CheckpointError, Damaged, GenerationDropped, NotFound, StorageFailed
from holdfast_formats.manifest import Manifest
from holdfast_formats.plan import Plan
from holdfast_formats.table import SlotTable
from holdfast_service.storage import Tier

from . import commit, planner, removal, roots
from .admission import Admission
from .catalog import Catalog
from .readers import Readers
from .rotation import Rotation
from .run_files import RunFiles

log = logging.getLogger(__name__)

RESTORE_MAX_S = 3600.0  # a launch that has restored and neither saved nor parted since reads no longer than this


def utc_now() -> str:
    """The time now, RFC 3339, UTC, in milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Decisions:
    """Attempts, rounds, commits and removals of one root. Thread-safe: the catalog serialises what must be."""

    def __init__(self, tier: Tier, catalog: Catalog, keep_last: int | None) -> None:
        self._tier = tier
        self._catalog = catalog
        self._keep_last = keep_last
        self._files = RunFiles(tier)
        self.readers = Readers()
        self.rotation = Rotation(tier, catalog, (self._files, self.readers))
        self._admission = Admission(tier, catalog, (self._files, self.rotation))
        self._restored: dict[tuple[str, int], int] = {}  # (run, attempt) -> the step that its ranks read

    def close(self) -> None:
        """Remove what is due, stop."""
        self.rotation.close()

    def recover(self, adopt: Callable[[], Collection[int]] = tuple) -> None:
        """At start: sweep what no commit ever published, make the catalog say what the directories say, end old rounds.

        Between the two, `adopt` takes up the rounds whose bytes an earlier daemon left in memory; it returns their ids.
        """
        for path in removal.sweep(self._tier):
            log.info("swept %s", path)
        for run, step, problem in roots.reconcile(self._tier, self._catalog):
            log.error("%s@%s is not listed: %s", run, step, problem.detail)
        why = "the daemon ended before this round was complete"
        self._catalog.abort_open_rounds(utc_now(), "round-aborted", why, keep=adopt())

    def hello(self, run: str, launch: str, world: int, keep_last: int | None) -> int:
        """The attempt number of this launch; the first rank of a launch declares it."""
        naming.check_run(run)
        attempt = self._catalog.declare_attempt(run, launch, world, utc_now())
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

    def commit(self, round_id: int, plan: Plan) -> Manifest:
        """Publish, then record; when this returns the checkpoint may be announced.

        The directory is the truth: a failure to record it does not undo it, the next look at the directories repairs that.
        """
        try:
            made = commit.publish(self._tier, plan, utc_now())
        except StorageFailed as error:
            if error.members.get("outcome") == "unknown":
                roots.reconcile(self._tier, self._catalog)
            raise
        try:
            self._catalog.record_checkpoint(rest.describe(made))
            self._catalog.end_round(round_id, "committed", utc_now())
        except CheckpointError as error:
            log.error("%s@%s is committed, but the catalog does not know: %s", made.run, made.step, error.detail)
        self.parted(made.run, made.attempt)  # what all ranks have saved anew, all of them have restored
        return made

    def abort(self, round_id: int, error: CheckpointError, staging: str | None) -> None:
        """End a round without a checkpoint and remove what it staged; what cannot be removed now, the next sweep removes."""
        state: Literal["aborted", "dropped"] = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        self._catalog.end_round(round_id, state, utc_now(), error.code, error.detail)
        if staging is not None:
            try:
                self._tier.remove_tree(staging)
            except CheckpointError as failure:
                log.warning("%s stays until the next start: %s", staging, failure.detail)

    def choose(self, run: str, attempt: int, turn: int, step: int | None, groups: Collection[str]) -> int | None:
        """The step that every rank of this attempt restores as its `turn`-th; None when there is nothing to restore."""
        known, answer = self._catalog.asked(run, attempt, turn)
        if known:
            return answer
        listed = {checkpoint.step for checkpoint in roots.all_checkpoints(self._catalog, run)}
        if listed != set(roots.committed(self._tier, run)):
            roots.reconcile(self._tier, self._catalog)
        if step is None:
            step = self._catalog.newest(run, groups)
        else:
            self._catalog.checkpoint(run, step)
        chosen = self._catalog.answer(run, attempt, turn, step)
        if chosen is not None:
            self.parted(run, attempt)
            self._restored[run, attempt] = chosen
            self.readers.hold(run, chosen, f"attempt {attempt}", RESTORE_MAX_S)
        return chosen

    def reading(self, run: str, step: int) -> AbstractContextManager[None]:
        """Nothing removes the checkpoint while the block reads it; `NoSuchCheckpoint` for one that is being removed."""
        return self.readers.reading(run, step, "the daemon")

    def verified(self, run: str, step: int) -> None:
        """A checkpoint was read back and found sound; only now may older ones go (I10)."""
        self._catalog.mark_verified(run, step)
        self.rotation.due(run)

    def parted(self, run: str, attempt: int) -> None:
        """The ranks of this attempt read what they restored no more."""
        step = self._restored.pop((run, attempt), None)
        if step is not None:
            self.readers.release(run, step, f"attempt {attempt}")
