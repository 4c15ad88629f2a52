"""Results of verification (I7): sound, damaged, or identical to the previous checkpoint. Stored only in the catalog.

A damaged checkpoint stays listed and keeps its bytes, but is never the newest one, and replaces no older one
(I10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from holdfast_formats import timestamps
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, NoSpace, from_problem
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints.storage_probe import Probed, StorageProbe
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.findings import missing

log = logging.getLogger(__name__)

FROZEN = (
    "it is bit-identical to step {before}: the optimizer did not step in between, the learning rate is 0, or "
    "the saved tensors are not the trained ones"
)
Fence = Callable[[Session], bool]  # called in the transaction that records a result
_MEANT = (CheckpointRow.damage.is_(None), CheckpointRow.abandoned.is_(False))


class Findings:
    """Records the results of checks, scrubs and reads. Thread-safe. `settled` is called with the run of each new result."""

    def __init__(
        self,
        catalog: Catalog,
        events: Events,
        record_queue: RecordQueue,
        now: Callable[[], str],
        settled: Callable[[str], None],
        probe: StorageProbe,
    ) -> None:
        self._events, self._record_queue = events, record_queue
        self._database, self._now, self._settled = catalog.database, now, settled
        self._probe = probe
        self._seen: dict[CheckpointId, dict[str, Any]] = {}  # damage that was found here, as the catalog may not know it yet

    def probed(self, run: str, step: int) -> Probed | None:
        """A checkpoint before it is read back: the stamp of its files, for `sound`, and its manifest; None where something
        is missing or has another length.
        """
        return self._probe.read(run, step)

    def sound(  # noqa: PLR0913 - each is one thing
        self,
        run: str,
        step: int,
        check: Mapping[str, Any] | None = None,
        same_as: int | None = None,
        made: Manifest | None = None,
        fence: Fence | None = None,
        proof: str | None = None,
    ) -> None:
        """Record that a checkpoint was read back whole and is sound; only now may older ones go (I10).

        Does nothing for one that has been removed meanwhile. `made` is what was read: another checkpoint in its place was
        not. `fence` returns whether the result still counts. `proof` is the stamp of its files before they were read, unless
        something was repaired.
        """
        proof = self._probe.proof(run, step) if proof is None else proof
        with self._database.write() as session:
            row = session.get(CheckpointRow, (run, step), with_for_update=True)
            if row is None:
                return
            if made is not None and (row.attempt, row.turn, row.created) != (made.attempt, made.turn, made.created):
                log.info("%s@%s was replaced while it was being verified", run, step)
                return
            if fence is not None and not fence(session):
                log.info("%s@%s is now checked by another node", run, step)
                return
            self.made(run, step)
            news = not row.verified
            frozen = same_as is not None and row.same_as != same_as
            row.mark_verified(self._now(), proof, check, same_as)
        if news:
            self._events.add("checkpoint-verified", f"step {step} was read back and verified", run, step)
        if frozen:
            text = FROZEN.format(before=same_as)
            log.warning("%s@%s: %s", run, step, text)
            self._events.add("checkpoint-frozen", f"step {step}: {text}", run, step, "warning", same_as=same_as)
        self._settled(run)

    def damaged(self, run: str, step: int, error: Damaged, checked: bool = False, fence: Fence | None = None) -> None:
        """Record that bytes of a checkpoint are not what was written. The same damage again is no news.

        `checked`: it was read back whole, rather than in part by a reader. `fence` returns whether the result still counts.
        """
        problem = {**error.problem(), "run": run, "step": step}
        at = self._now() if checked else None
        if fence is None:
            self._seen[CheckpointId(run, step)] = problem
        try:
            self._note_damage(CheckpointId(run, step), problem, at, fence)
        except (CatalogUnavailable, NoSpace) as away:
            log.error("%s@%s is damaged: %s (%s)", run, step, error.detail, away.detail)
            self._seen[CheckpointId(run, step)] = problem
            self._record_queue.enqueue("of damage", lambda: self._note_damage(CheckpointId(run, step), problem, at, fence))

    def _note_damage(self, place: CheckpointId, problem: dict[str, Any], checked: str | None, fence: Fence | None) -> None:
        run, step = place
        with self._database.write() as session:
            row = session.get(CheckpointRow, (run, step), with_for_update=True)
            if fence is not None and not fence(session):
                log.info("%s@%s is now checked by another node", run, step)
                return
            self._seen[place] = problem
            if row is None:
                return
            news = row.damage is None or _place(row.damage) != _place(problem)
            row.mark_damaged(problem, checked)
        if news:
            log.error("%s@%s is damaged: %s", run, step, problem["detail"])
            text = f"step {step} is damaged: {problem['detail']}"
            self._events.add("checkpoint-damaged", text, run, step, "error", problem=problem)
            self._settled(run)

    def seen(self, run: str, step: int) -> Damaged | None:
        """Damage found since the start and not repaired since; without the catalog."""
        return as_damage(self._seen.get(CheckpointId(run, step)))

    def made(self, run: str, step: int) -> None:
        """Drop the known damage of this step: it is sound, or was saved again."""
        self._seen.pop(CheckpointId(run, step), None)

    def repaired(self, run: str, step: int, error: Damaged, source: str) -> None:
        """Damaged bytes were replaced by proven ones."""
        self.made(run, step)
        log.warning("%s@%s was repaired from %s: %s", run, step, source, error.detail)

    def scrubbed(self, checkpoints: int, size: int, damages: int, seconds: float) -> None:
        """Record the end of a scrub."""
        text = (
            f"{checkpoints} checkpoints of {size:,} bytes were verified in {timestamps.span(seconds)}, {damages} are damaged"
        )
        level: Literal["info", "warning"] = "warning" if damages else "info"
        about: dict[str, Any] = {"checkpoints": checkpoints, "bytes": size, "damaged": damages, "seconds": round(seconds, 3)}
        self._events.add("scrub-finished", text, None, None, level, **about)

    def damage(self, run: str, step: int) -> Damaged | None:
        """The recorded damage of a checkpoint; None while it is sound, and for a missing one."""
        try:
            with self._database.read() as session:
                row = session.get(CheckpointRow, (run, step))
                return None if row is None else as_damage(row.damage)
        except CatalogUnavailable:
            return self.seen(run, step)

    def result_of(self, run: str, step: int) -> Literal["sound", "damaged", "gone", "unknown"]:
        """The recorded state of a checkpoint: `gone` for one that is not listed, `unknown` until it was checked."""
        with self._database.read() as session:
            row = session.get(CheckpointRow, (run, step))
            if row is None:
                return "gone"
            return "damaged" if row.damage is not None else "sound" if row.verified else "unknown"

    def damaged_steps(self, run: str) -> list[int]:
        """The checkpoints of a run that are listed as damaged."""
        with self._database.read() as session:
            where = (CheckpointRow.run == run, CheckpointRow.damage.is_not(None))
            return list(session.scalars(select(CheckpointRow.step).where(*where)))

    def unchecked(self) -> list[CheckpointId]:
        """Checkpoints never read back, newest first: found in the directories, or committed before a daemon died."""
        wanted = select(CheckpointRow.run, CheckpointRow.step).where(
            CheckpointRow.checked.is_(None), CheckpointRow.verified.is_(False), CheckpointRow.damage.is_(None)
        )
        with self._database.read() as session:
            rows = session.execute(wanted.order_by(CheckpointRow.step.desc(), CheckpointRow.run))
            return [CheckpointId(run, step) for run, step in rows]

    def due(self, before: str) -> list[CheckpointId]:
        """What was last read back before this time, or never; the longest ago first."""
        never = CheckpointRow.checked.is_(None)
        wanted = select(CheckpointRow.run, CheckpointRow.step).where(or_(never, CheckpointRow.checked < before))
        order = (never.desc(), CheckpointRow.checked, CheckpointRow.run, CheckpointRow.step.desc())
        with self._database.read() as session:
            return [CheckpointId(run, step) for run, step in session.execute(wanted.order_by(*order))]

    def oldest(self) -> str | None:
        """The time of the oldest read-back; None without any."""
        with self._database.read() as session:
            return session.scalar(select(func.min(CheckpointRow.checked)))

    def newest(self, run: str) -> int | None:
        wanted = (CheckpointRow.run == run, *_MEANT)
        try:
            with self._database.read() as session:
                return session.scalar(select(func.max(CheckpointRow.step)).where(*wanted))
        except CatalogUnavailable:
            return None

    def before(self, run: str, step: int) -> int | None:
        wanted = (CheckpointRow.run == run, CheckpointRow.step < step, *_MEANT)
        with self._database.read() as session:
            return session.scalar(select(func.max(CheckpointRow.step)).where(*wanted))

    def passed_over(self, run: str, step: int | None) -> list[str]:
        """Messages about the newer checkpoints that were skipped for this step: damaged, and how, or gone; newest first."""
        newer = CheckpointRow.step > (-1 if step is None else step)
        damaged = (CheckpointRow.damage.is_not(None), CheckpointRow.abandoned.is_(False))
        wanted = select(CheckpointRow.step, CheckpointRow.damage).where(CheckpointRow.run == run, newer, *damaged)
        instead = "no sound checkpoint is left" if step is None else f"restored step {step} instead"
        try:
            with self._database.read() as session:
                texts = session.execute(wanted.order_by(CheckpointRow.step.desc())).all()
            gone = [] if step is None else [at for at in missing.missing(self._database, run) if at > step]
        except CatalogUnavailable as away:
            known = "nothing" if step is None else f"step {step}"
            return [f"{known} was found in the directory, because the catalog does not respond: {away.detail}"]
        said = {newer: f"step {newer} is damaged ({damage.get('detail', 'unknown')}): {instead}" for newer, damage in texts}
        back = "`holdfast repair {0}@{1}` copies it back if a replica has it"
        said |= {
            at: f"step {at} is gone, removed by something other than Holdfast: {instead}; {back.format(run, at)}"
            for at in gone
        }
        return [said[newer] for newer in sorted(said, reverse=True)]


def as_damage(problem: Mapping[str, Any] | None) -> Damaged | None:
    """The error that a checkpoint's `damage` describes."""
    if problem is None:
        return None
    error: CheckpointError = from_problem(problem)
    return error if isinstance(error, Damaged) else Damaged(error.detail, hint=error.hint, **error.members)


def _place(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(problem.get(member) for member in ("code", "file", "tensor", "offset", "length"))
