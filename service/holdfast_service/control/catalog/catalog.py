"""The catalog: runs, attempts, checkpoints, and the records of saves, in SQL. An index of the directories, shared by nodes.

Every call is one transaction. Calls that read before they write lock the run's row, so calls of several nodes are
ordered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import Life
from holdfast_formats.rest.search import SearchHit
from holdfast_service.control.catalog import lineage_records, listing, losses, search, statistics, stored_life
from holdfast_service.control.catalog.attempts import RunAttempts
from holdfast_service.control.catalog.listing import EVERYTHING, Within
from holdfast_service.control.catalog.pages import INTEGER_MAX
from holdfast_service.control.catalog.round_records import RoundRecords
from holdfast_service.control.catalog.run_times import RunTimes
from holdfast_service.control.catalog.search import Labels, SearchQuery
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import AnswerRow, AttemptRow, CheckpointRow, RunRow
from holdfast_service.control.signals import Signal

log = logging.getLogger(__name__)

ANY_FILES = "*"  # a verified checkpoint of which it is not known as which files it was read back
_STORED = set(bodies.CheckpointInfo.model_fields) - bodies.MARKS


class KnownRun(NamedTuple):
    """The catalog's own record of a run: the newest declared attempt, and what retention keeps."""

    attempt: int
    keep_last: int | None


class CommitProof(NamedTuple):
    """The files as which a checkpoint was read back, None if it is not verified; and when it was committed, in time that
    daemons have seen.
    """

    proven: str | None
    seen_s: float


class Catalog:
    """Runs, attempts, rounds and checkpoints of one database. Thread-safe. Callers pass times as RFC 3339 text."""

    def __init__(self, database: Database, node: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`node` writes the rounds that end here; `clock` sees time pass between commits."""
        self.database, self.node = database, node
        self.told: Signal[[str, int]] = Signal()  # so many events of a kind were recorded
        self._read, self._write = database.read, database.write
        self.rounds = RoundRecords(database, node)
        self._times = RunTimes(database.is_shared, clock)

    @classmethod
    def open(cls, url: str, node: str | None = None) -> Catalog:
        """The catalog at `url`, made or brought to the newest version first."""
        return cls(Database.open(url), node)

    def close(self) -> None:
        self.database.close()

    def declare_attempt(self, run: str, launch: str, world: int, now: str, attempt: int | None = None) -> int:
        """The attempt of this launch: the one it has, else `attempt`, or the next one.

        `Attempts` numbers launches and refuses older ones (I6); this records its result.
        """
        with self._write() as session:
            row = lock_run(session, run)
            known = session.get(AttemptRow, (run, launch))
            if known is not None and (attempt is None or attempt <= known.attempt):
                return known.attempt
            number = row.attempt + 1 if attempt is None else attempt
            row.raise_attempt(number)
            session.merge(AttemptRow(run=run, launch=launch, attempt=number, world=world, declared=now))
            return number

    def note_attempts(self, known: Mapping[str, RunAttempts]) -> None:
        """Raise every run's newest attempt to at least the one that is `known`."""
        with self._write() as session:
            listed = {row.name: row.attempt for row in session.scalars(select(RunRow))}
            for run in [run for run, declared in known.items() if declared.attempt > listed.get(run, 0)]:
                lock_run(session, run).raise_attempt(known[run].attempt)

    def note_life(self, run: str, attempt: int, life: Life, since: str | None) -> None:
        """Record the state of the ranks of a run's newest attempt; does nothing for an older one."""
        with self._write(hasty=True) as session:
            row = lock_run(session, run)
            if row.attempt == attempt:
                row.life, row.since = stored_life.write(life), since

    def lives(self, runs: Collection[str] | None = None) -> dict[str, tuple[int, Life, str | None]]:
        """The state of the ranks of these runs, or of all: newest attempt, state, and since when it is over."""
        known = select(RunRow.name, RunRow.attempt, RunRow.life, RunRow.since).where(RunRow.life.is_not(None))
        known = known if runs is None else known.where(RunRow.name.in_(runs))
        with self._read() as session:
            return {name: (attempt, stored_life.read(life), since) for name, attempt, life, since in session.execute(known)}

    def declared(self) -> dict[str, RunAttempts]:
        """All runs' attempts: the newest, those of launches, and the steps that they restore."""
        launches: dict[str, dict[str, int]] = {}
        answers: dict[str, dict[str, int | None]] = {}
        with self._read() as session:
            newest = {row.name: row.attempt for row in session.scalars(select(RunRow))}
            for row in session.scalars(select(AttemptRow).order_by(AttemptRow.run, AttemptRow.attempt)):
                launches.setdefault(row.run, {})[row.launch] = row.attempt
            told = select(AnswerRow).join(RunRow, (RunRow.name == AnswerRow.run) & (RunRow.attempt == AnswerRow.attempt))
            for answer in session.scalars(told.order_by(AnswerRow.turn)):
                answers.setdefault(answer.run, {})[f"{answer.attempt}.{answer.turn}"] = answer.step
        return {
            run: RunAttempts(attempt=attempt, launches=launches.get(run, {}), answers=answers.get(run, {}))
            for run, attempt in newest.items()
        }

    def newest_attempt(self, run: str) -> int:
        """The newest attempt of a run, 0 when there is none."""
        with self._read() as session:
            return session.scalar(select(RunRow.attempt).where(RunRow.name == run)) or 0

    def set_keep_last(self, run: str, keep_last: int | None) -> None:
        """Set how many checkpoints retention keeps, None for all; adds an unknown run."""
        if keep_last is not None and not 1 <= keep_last <= INTEGER_MAX:
            raise InvalidRequest(f"keep_last must be at least 1, not {keep_last}", hint="leave it out to keep all")
        with self._write(hasty=True) as session:
            lock_run(session, run).keep_last = keep_last

    def keep_last(self, run: str) -> int | None:
        with self._read() as session:
            return session.scalar(select(RunRow.keep_last).where(RunRow.name == run))

    def answer(self, run: str, attempt: int, turn: int, step: int | None) -> int | None:
        """Store the answer to an attempt's `turn`-th question unless there is one; return the one that is stored."""
        with self._write() as session:
            lock_run(session, run)
            stored = session.get(AnswerRow, (run, attempt, turn))
            if stored is not None:
                return stored.step
            session.add(AnswerRow(run=run, attempt=attempt, turn=turn, step=step))
            return step

    def lines(self, run: str) -> list[lineage_records.ListedCheckpoint]:
        with self._read() as session:
            return lineage_records.of(session, run)

    def record_checkpoint(
        self, checkpoint: bodies.CheckpointInfo, stamp: str | None = None, proven: str | None = None
    ) -> None:
        """List a checkpoint, in the place of its step's. `stamp` is what storage says of it, and `proven` of all its files
        where they are known to be sound.
        """
        run, step = checkpoint.run, checkpoint.step
        with self._write(hasty=True) as session:
            row = lock_run(session, run)
            # So that a catalog made again from directories never gives an attempt number out twice.
            row.raise_attempt(checkpoint.attempt)
            known = session.get(CheckpointRow, (run, step))
            if known is not None and _identity(known) != _identity(checkpoint):
                statistics.forget_tensors(session, run, step)  # of another checkpoint of this step
                known = None
            seen_s = self._times.now(session, row) if known is None else None
            session.merge(_row(checkpoint, stamp, proven, seen_s))
            lineage_records.settle(session, run)

    def list_damaged(self, damaged: bodies.CheckpointInfo, before: Mapping[int, str | None]) -> None:
        """List a checkpoint as damaged, unless its step was listed again or forgotten since these stamps of the run."""
        run, step = damaged.run, damaged.step
        with self._write(hasty=True) as session:
            row = lock_run(session, run)
            listed = session.execute(select(CheckpointRow.stamp).where(*_at(run, step))).scalars().all()
            if listed != ([before[step]] if step in before else []):
                return  # what was found out is about another one
            row.raise_attempt(damaged.attempt)
            session.merge(_row(damaged, None, seen_s=None if listed else self._times.now(session, row)))
            lineage_records.settle(session, run)

    def relist(
        self,
        run: str,
        gone: Mapping[int, str | None],
        found: Sequence[tuple[bodies.CheckpointInfo, str | None]],
        stamps: Mapping[int, str | None],
        at: str,
        is_known: bool = True,
    ) -> None:
        """In one transaction: delist `gone`, list what was `found`, record the `stamps` of unchanged checkpoints, and as
        lost, at the time `at`, those that were not removed through Holdfast (`losses`).

        `gone` comes with the stamps that were listed: what has been saved again since then stays, and so does what another
        process has listed meanwhile.
        """
        with self._write(hasty=True) as session:
            row = lock_run(session, run)
            before = losses.listed(session, run)
            ended = [step for step, stamp in gone.items() if step in before and before[step].stamp == stamp]
            for step in ended:
                _forget(session, run, step)
            there = before.keys() - {*ended}
            new = [(checkpoint, stamp) for checkpoint, stamp in found if checkpoint.step not in there]
            if new:
                row.raise_attempt(max(checkpoint.attempt for checkpoint, _ in new))
                seen = self._times.now(session, row)
                session.add_all(_row(checkpoint, stamp, None, seen) for checkpoint, stamp in new)
            for step, stamp in stamps.items():
                session.execute(update(CheckpointRow).where(*_at(run, step)).values(stamp=stamp))
            lineage_records.settle(session, run)
            lost = losses.lost(before, ended, [checkpoint.step for checkpoint, _ in new], is_known)
            losses.record(session, run, lost, self.node or "node", at)
        for step in lost:
            log.error("%s: %s", run, losses.text(step))
        if lost:
            self.told.publish(losses.KIND, len(lost))

    def forget_checkpoint(self, run: str, step: int) -> None:
        """Delist a checkpoint; idempotent. Its replicas' rows stay."""
        with self._write(hasty=True) as session:
            _forget(session, run, step)
            lineage_records.settle(session, run)

    def search(self, asked: SearchQuery, limit: int, labels_of: Labels) -> list[SearchHit]:
        """Runs and checkpoints that contain this text, the best first."""
        with self._read() as session:
            return search.search(session, asked, limit, labels_of)

    def run(self, name: str) -> bodies.Run:
        with self._read() as session:
            row = session.get(RunRow, name) if naming.is_run_name(name) else None
            if row is None:
                raise listing.no_such_run(name)
            return listing.summed(session, row)

    def check_run(self, name: str) -> None:
        """`NoSuchRun` for a run that the catalog does not know."""
        with self._read() as session:
            listing.check_known(session, name)

    def known_runs(self) -> dict[str, KnownRun]:
        with self._read() as session:
            rows = session.execute(select(RunRow.name, RunRow.attempt, RunRow.keep_last))
            return {name: KnownRun(attempt, keep_last) for name, attempt, keep_last in rows}

    def checkpoints(
        self, run: str, cursor: str | None, limit: int, state: str | None = None, within: Within = EVERYTHING
    ) -> bodies.Page[bodies.CheckpointInfo]:
        """A page of a run's checkpoints, newest step first; only those in this state and within these bounds."""
        with self._read() as session:
            return listing.checkpoints(session, run, cursor, limit, state, within)

    def stamps(self, run: str) -> dict[int, str | None]:
        """Every listed step of a run, and its stamp."""
        with self._read() as session:
            rows = session.execute(select(CheckpointRow.step, CheckpointRow.stamp).where(CheckpointRow.run == run))
            return {step: stamp for step, stamp in rows}

    def proofs(self, run: str) -> dict[int, CommitProof]:
        """For every listed step of a run, what its manifest does not contain."""
        row = CheckpointRow
        columns = select(row.step, row.proven, row.verified, row.seen_s).where(row.run == run)
        with self._read() as session:
            return {
                step: CommitProof((proven or ANY_FILES) if verified else None, seen_s or 0.0)
                for step, proven, verified, seen_s in session.execute(columns)
            }

    def all_proofs(self) -> dict[str, dict[int, str | None]]:
        """Of every checkpoint of every run, the files as which it was read back; None where unknown or not sound."""
        proofs: dict[str, dict[int, str | None]] = {}
        columns = select(CheckpointRow.run, CheckpointRow.step, CheckpointRow.proven, CheckpointRow.verified)
        with self._read() as session:
            for run, step, proven, verified in session.execute(columns):
                proofs.setdefault(run, {})[step] = (proven or ANY_FILES) if verified else None
        return proofs

    def renamed(self, run: str, name: str) -> None:
        """Keep a renamed run's time going."""
        self._times.renamed(run, name)

    def prove(self, run: str, step: int, proven: str) -> None:
        """Record a verified checkpoint's present files as those that were read back."""
        with self._write() as session:
            session.execute(update(CheckpointRow).where(*_at(run, step), CheckpointRow.verified).values(proven=proven))

    def doubt(self, run: str, step: int, proven: str) -> bool:
        """Mark a verified checkpoint as unverified because its files differ from those read back. False where it was
        verified again meanwhile.
        """
        same = [*_at(run, step), CheckpointRow.verified]
        if proven != ANY_FILES:
            same.append(CheckpointRow.proven == proven)
        with self._write(hasty=True) as session:
            doubted = update(CheckpointRow).where(*same).values(verified=False, checked=None, proven=None)
            return bool(session.execute(doubted.returning(CheckpointRow.step)).all())

    def checkpoint(self, run: str, step: int) -> bodies.CheckpointInfo:
        naming.check_step(step)
        with self._read() as session:
            row = session.get(CheckpointRow, (run, step)) if naming.is_run_name(run) else None
            if row is None:
                listing.check_known(session, run)
                raise NoSuchCheckpoint(
                    f"{run} has no checkpoint of step {step}", hint=f"list its checkpoints with `holdfast ls {run}`"
                )
            return listing.checkpoint(row)

    def newest(self, run: str, groups: Collection[str] = ()) -> int | None:
        """The newest step that has all these groups and is neither known to be damaged nor abandoned; or None."""
        columns = select(CheckpointRow.step, CheckpointRow.groups)
        wanted = (CheckpointRow.run == run, CheckpointRow.damage.is_(None), CheckpointRow.abandoned.is_(False))
        with self._read() as session:
            rows = session.execute(columns.where(*wanted).order_by(CheckpointRow.step.desc()))
            return next((step for step, held in rows if set(groups) <= set(held)), None)


def _row(
    checkpoint: bodies.CheckpointInfo, stamp: str | None, proven: str | None = None, seen_s: float | None = None
) -> CheckpointRow:
    naming.check_step(checkpoint.step)
    known = {} if seen_s is None else {"seen_s": seen_s}
    return CheckpointRow(**checkpoint.model_dump(include=_STORED), stamp=stamp, proven=proven, **known)


def _identity(of: CheckpointRow | bodies.CheckpointInfo) -> tuple[str, int, int]:
    """What no other checkpoint of the step has. A launch that replaces its own sound save does so in another turn, whatever
    the clock says; what a repair or thinning changes is not in it.
    """
    return of.created, of.attempt, of.turn


def _forget(session: Session, run: str, step: int) -> None:
    session.execute(delete(CheckpointRow).where(*_at(run, step)))
    statistics.forget(session, run, step)


def _at(run: str, step: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return CheckpointRow.run == run, CheckpointRow.step == naming.check_step(step)
