"""The catalog: runs, attempts, rounds and checkpoints in SQL. An index of the directories, and where nodes agree.

Every call is one transaction. What reads before it writes holds the run's row locked, so calls of many nodes are in order.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, Engine, delete, func, select, update
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from holdfast_formats import naming, rest
from holdfast_formats.errors import (
    AlreadyCommitted,
    InvalidRequest,
    LimitExceeded,
    NoSpace,
    NoSuchCheckpoint,
    NoSuchResource,
    NoSuchRun,
    StaleAttempt,
    StorageFailed,
)

from .migrations import migrate
from .schema import READ_ONLY, AnswerRow, AttemptRow, CheckpointRow, RoundRow, RunRow, connect

PAGE_ITEMS_MAX = 1000
GOING_ON = ("open", "sealed")
ENDED = ("committed", "aborted", "dropped")
ROUND_STATES = (*GOING_ON, *ENDED)
_INTEGER_MAX = 2**63 - 1
_SQLITE_FULL = "database or disk is full"  # Python 3.10 does not give the error code
_Item = TypeVar("_Item")


class Catalog:
    """The catalog at one URL. Thread-safe: a session a call. Times are RFC 3339 text that the caller gives."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = engine.execution_options(**{READ_ONLY: True})

    @classmethod
    def open(cls, url: str) -> Catalog:
        """The catalog at `url`, made or brought to the newest version first."""
        try:
            engine = connect(url)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise InvalidRequest(
                f"{url!r} is not a catalog's address: {error}", hint="use sqlite:///path or postgresql+psycopg://…"
            ) from error
        try:
            with _translated():
                migrate(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def close(self) -> None:
        self._engine.dispose()

    def declare_attempt(self, run: str, launch: str, world: int, now: str) -> int:
        """The attempt of this launch: the one it has, else the next one, which fences off all before it (I6)."""
        with self._write() as session:
            row = _lock_run(session, run)
            known = session.get(AttemptRow, (run, launch))
            if known is not None:
                return known.attempt
            row.attempt += 1
            session.add(AttemptRow(run=run, launch=launch, attempt=row.attempt, world=world, declared=now))
            return row.attempt

    def newest_attempt(self, run: str) -> int:
        """The newest attempt of a run, 0 when there is none."""
        with self._read() as session:
            return session.scalar(select(RunRow.attempt).where(RunRow.name == run)) or 0

    def set_keep_last(self, run: str, keep_last: int | None) -> None:
        """Set how many checkpoints retention keeps, None for all; a run that is not known yet becomes known."""
        if keep_last is not None and not 1 <= keep_last <= _INTEGER_MAX:
            raise InvalidRequest(f"keep_last must be at least 1, not {keep_last}", hint="leave it out to keep all")
        with self._write() as session:
            _lock_run(session, run).keep_last = keep_last

    def keep_last(self, run: str) -> int | None:
        with self._read() as session:
            return session.scalar(select(RunRow.keep_last).where(RunRow.name == run))

    def answer(self, run: str, attempt: int, turn: int, step: int | None) -> int | None:
        """Store the answer to an attempt's `turn`-th question unless there is one; return the one that is stored."""
        with self._write() as session:
            _lock_run(session, run)
            stored = session.get(AnswerRow, (run, attempt, turn))
            if stored is not None:
                return stored.step
            session.add(AnswerRow(run=run, attempt=attempt, turn=turn, step=step))
            return step

    def asked(self, run: str, attempt: int, turn: int) -> tuple[bool, int | None]:
        """Whether the question has been answered, and the answer."""
        with self._read() as session:
            stored = session.get(AnswerRow, (run, attempt, turn))
            return (False, None) if stored is None else (True, stored.step)

    def open_round(self, run: str, step: int, attempt: int, world: int, now: str) -> int:
        """The id of the round of this step and attempt: the one going on, else a new one.

        Raises `StaleAttempt` for an attempt older than the newest (I6) and `AlreadyCommitted` when the step is a checkpoint.
        """
        naming.check_step(step)
        with self._write() as session:
            row = _lock_run(session, run)
            if attempt < row.attempt:
                raise StaleAttempt(
                    f"attempt {attempt} of {run} is over: attempt {row.attempt} has been declared",
                    hint="a newer launch of this run is training; stop this one",
                    newest=row.attempt,
                )
            if session.get(CheckpointRow, (run, step)) is not None:
                raise AlreadyCommitted(f"{run}@{step} is committed already", hint="remove it first to save it anew")
            # After a loss of the catalog a sealed slot may know of an attempt that nobody has declared since.
            row.attempt = max(row.attempt, attempt)
            same = (RoundRow.run == run, RoundRow.step == step, RoundRow.attempt == attempt)
            known = session.scalar(select(RoundRow.id).where(*same, RoundRow.state.in_(GOING_ON)))
            if known is not None:
                return known
            made = RoundRow(run=run, step=step, attempt=attempt, world=world, state="open", sealed=0, opened=now)
            session.add(made)
            session.flush()
            return made.id

    def resume_round(self, run: str, step: int, attempt: int, world: int, now: str) -> int:
        """As `open_round`, but a round that all ranks had sealed goes on though a newer attempt waits for its end (I6)."""
        with self._read() as session:
            same = (RoundRow.run == run, RoundRow.step == step, RoundRow.attempt == attempt)
            known = session.scalar(select(RoundRow.id).where(*same, RoundRow.state == "sealed"))
            if known is not None and session.get(CheckpointRow, (run, step)) is None:
                return known
        return self.open_round(run, step, attempt, world, now)

    def update_round(self, round_id: int, *, sealed: int) -> None:
        """Note how many ranks have sealed; a round that has ended stays as it ended."""
        with self._write() as session:
            row = _lock_round(session, round_id)
            if row.state in GOING_ON:
                row.sealed = sealed
                row.state = "sealed" if sealed >= row.world else "open"

    def end_round(
        self,
        round_id: int,
        state: Literal["committed", "aborted", "dropped"],
        now: str,
        code: str | None = None,
        detail: str | None = None,
    ) -> None:
        """End a round; the first end stands, a second one changes nothing."""
        with self._write() as session:
            row = _lock_round(session, round_id)
            if row.state in GOING_ON:
                row.state, row.ended, row.code, row.detail = state, now, code, detail

    def abort_open_rounds(self, now: str, code: str, detail: str, keep: Collection[int] = ()) -> list[int]:
        """Abort every round going on but those to keep; return their ids."""
        with self._write() as session:
            wanted: list[ColumnElement[bool]] = [RoundRow.state.in_(GOING_ON), RoundRow.id.not_in(keep)]
            rows = session.scalars(select(RoundRow).where(*wanted).order_by(RoundRow.id).with_for_update()).all()
            for row in rows:
                row.state, row.ended, row.code, row.detail = "aborted", now, code, detail
            return [row.id for row in rows]

    def record_checkpoint(self, checkpoint: rest.Checkpoint) -> None:
        """List a checkpoint, in the place of what was listed for its step."""
        naming.check_step(checkpoint.step)
        with self._write() as session:
            row = _lock_run(session, checkpoint.run)
            # So that a catalog made anew from directories never gives an attempt number out twice.
            row.attempt = max(row.attempt, checkpoint.attempt)
            session.merge(CheckpointRow(**checkpoint.model_dump()))

    def mark_verified(self, run: str, step: int) -> None:
        """Note that a checkpoint was read back and found sound; one that has been removed meanwhile stays removed."""
        with self._write() as session:
            session.execute(update(CheckpointRow).where(*_at(run, step)).values(verified=True))

    def forget_checkpoint(self, run: str, step: int) -> None:
        """List a checkpoint no more; does nothing for one that is not listed."""
        with self._write() as session:
            session.execute(delete(CheckpointRow).where(*_at(run, step)))

    def runs(self, cursor: str | None, limit: int) -> rest.Page[rest.Run]:
        """A page of all runs, by name."""
        after = _decode_cursor("run", cursor)
        with self._read() as session:
            found = _runs(session, () if after is None else (RunRow.name > after,), _bounded(limit))
        return _page("run", found, limit, lambda run: run.name)

    def run(self, name: str) -> rest.Run:
        with self._read() as session:
            found = _runs(session, (RunRow.name == name,), 1)
        if not found:
            raise _no_such_run(name)
        return found[0]

    def checkpoints(self, run: str, cursor: str | None, limit: int) -> rest.Page[rest.Checkpoint]:
        """A page of a run's checkpoints, newest step first."""
        before = _decode_cursor("step", cursor)
        wanted = select(CheckpointRow).where(CheckpointRow.run == run).order_by(CheckpointRow.step.desc())
        if before is not None:
            wanted = wanted.where(CheckpointRow.step < _integer(before))
        with self._read() as session:
            _check_known(session, run)
            found = [_checkpoint(row) for row in session.scalars(wanted.limit(_bounded(limit) + 1))]
        return _page("step", found, limit, lambda checkpoint: checkpoint.step)

    def checkpoint(self, run: str, step: int) -> rest.Checkpoint:
        naming.check_step(step)
        with self._read() as session:
            row = session.get(CheckpointRow, (run, step))
            if row is None:
                _check_known(session, run)
                raise NoSuchCheckpoint(f"{run} has no checkpoint of step {step}", hint=f"holdfast ls {run} lists them")
            return _checkpoint(row)

    def newest(self, run: str, groups: Collection[str] = ()) -> int | None:
        """The newest step whose checkpoint has all these groups; None when there is none."""
        columns = select(CheckpointRow.step, CheckpointRow.groups)
        with self._read() as session:
            rows = session.execute(columns.where(CheckpointRow.run == run).order_by(CheckpointRow.step.desc()))
            return next((step for step, held in rows if set(groups) <= set(held)), None)

    def rounds(
        self, run: str | None = None, state: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> rest.Page[rest.Round]:
        """A page of rounds, the newest first, of one run or in one state if these are given."""
        before = _decode_cursor("round", cursor)
        wanted = select(RoundRow).order_by(RoundRow.id.desc()).limit(_bounded(limit) + 1)
        if before is not None:
            wanted = wanted.where(RoundRow.id < _integer(before))
        if state is not None:
            if state not in ROUND_STATES:
                raise InvalidRequest(f"{state!r} is not a round's state", hint=f"one of {', '.join(ROUND_STATES)}")
            wanted = wanted.where(RoundRow.state == state)
        with self._read() as session:
            if run is not None:
                _check_known(session, run)
                wanted = wanted.where(RoundRow.run == run)
            found = [rest.Round.model_validate(row, from_attributes=True) for row in session.scalars(wanted)]
        return _page("round", found, limit, lambda made: made.id)

    def round_counts(self) -> dict[str, int]:
        """How many rounds there are in each state."""
        with self._read() as session:
            counted = session.execute(select(RoundRow.state, func.count()).group_by(RoundRow.state)).all()
        return dict.fromkeys(ROUND_STATES, 0) | {state: count for state, count in counted}

    def failure_counts(self) -> dict[str, int]:
        """How many rounds ended without a checkpoint, by the code of what ended them."""
        counted = select(RoundRow.code, func.count()).where(RoundRow.code.is_not(None)).group_by(RoundRow.code)
        with self._read() as session:
            return {str(code): count for code, count in session.execute(counted)}

    @contextmanager
    def _read(self) -> Iterator[Session]:
        with _translated(), Session(self._reading) as session:
            yield session

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with _translated(), Session(self._engine) as session, session.begin():
            yield session


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the database or its driver reports into the named error that says what to do."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        if _SQLITE_FULL in str(cause):
            raise NoSpace(f"the catalog: {cause}", hint="free space, or keep fewer checkpoints") from error
        raise StorageFailed(
            f"the catalog: {cause}",
            hint="check the catalog's database; a damaged one may be moved away, it is made anew from the directories",
        ) from error


def _lock_run(session: Session, run: str) -> RunRow:
    """The run's row, made if need be, which no other transaction changes until this one ends."""
    naming.check_run(run)
    row = session.get(RunRow, run, with_for_update=True)
    if row is None:
        try:
            with session.begin_nested():
                session.add(RunRow(name=run, attempt=0))
        except IntegrityError:
            session.expire_all()  # another node was faster
        row = session.get_one(RunRow, run, with_for_update=True)
    return row


def _lock_round(session: Session, round_id: int) -> RoundRow:
    row = session.get(RoundRow, round_id, with_for_update=True)
    if row is None:
        raise NoSuchResource(f"there is no round {round_id}")
    return row


def _no_such_run(run: str) -> NoSuchRun:
    return NoSuchRun(f"there is no run {run!r}", hint="holdfast ls lists the runs")


def _check_known(session: Session, run: str) -> None:
    if session.get(RunRow, run) is None:
        raise _no_such_run(run)


def _at(run: str, step: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return CheckpointRow.run == run, CheckpointRow.step == naming.check_step(step)


def _checkpoint(row: CheckpointRow) -> rest.Checkpoint:
    return rest.Checkpoint.model_validate(row, from_attributes=True)


def _runs(session: Session, wanted: Sequence[ColumnElement[bool]], limit: int) -> list[rest.Run]:
    totals = (
        select(
            CheckpointRow.run,
            func.count().label("checkpoints"),
            func.max(CheckpointRow.step).label("newest"),
            func.sum(CheckpointRow.bytes).label("bytes"),
        )
        .group_by(CheckpointRow.run)
        .subquery()
    )
    columns = select(RunRow, totals.c.checkpoints, totals.c.newest, totals.c.bytes)
    joined = columns.outerjoin(totals, totals.c.run == RunRow.name).where(*wanted).order_by(RunRow.name)
    return [
        rest.Run(
            name=row.name,
            attempt=row.attempt,
            keep_last=row.keep_last,
            checkpoints=checkpoints or 0,
            newest=newest,
            bytes=int(size or 0),
        )
        for row, checkpoints, newest, size in session.execute(joined.limit(limit + 1))
    ]


def _bounded(limit: int) -> int:
    if limit < 1:
        raise InvalidRequest(f"a page has at least 1 item, not {limit}")
    if limit > PAGE_ITEMS_MAX:
        raise LimitExceeded(f"a page has at most {PAGE_ITEMS_MAX} items, not {limit}")
    return limit


def _page(kind: str, found: list[_Item], limit: int, key: Callable[[_Item], Any]) -> rest.Page[_Item]:
    """A page from one item more than it holds: the cursor names the last item, so inserts move nothing."""
    items = found[:limit]
    behind = f"{kind}:{key(items[-1])}".encode() if len(found) > limit else None
    return rest.Page(items=items, next=None if behind is None else base64.urlsafe_b64encode(behind).decode())


def _decode_cursor(kind: str, cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        named, _, key = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        named, key = "", ""
    if named != kind or not key:
        raise _bad_cursor()
    return key


def _integer(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 19 and int(key) <= _INTEGER_MAX):
        raise _bad_cursor()
    return int(key)


def _bad_cursor() -> InvalidRequest:
    return InvalidRequest("the cursor is not one of this list", hint="use `next` of the page before, unchanged")
