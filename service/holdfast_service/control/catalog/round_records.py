"""The records of saves (rounds) in the catalog, from the first rank's lease to the end.

Every call is one transaction, as in `catalog`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session, aliased

from holdfast_formats import naming
from holdfast_formats.errors import NoSuchResource
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog import listing
from holdfast_service.control.catalog.listing import EVERYTHING, GOING_ON, ROUND_STATES, Within
from holdfast_service.control.database.cluster_schema import NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import CheckpointRow, RoundRow

UNSAVED = ("aborted", "dropped")
NEWEST = 64  # rounds of a run, among which is one that another node has just ended


class RoundRecords:
    """Rounds of one database. Thread-safe. Callers pass times as RFC 3339 text."""

    def __init__(self, database: Database, node: str | None = None) -> None:
        """`node` writes the rounds that end here."""
        self._read, self._write = database.read, database.write
        self._shared, self._node = database.is_shared, node

    def open(
        self, run: str, step: int, attempt: int, world: int, opened: str, others: Collection[int] = ()
    ) -> tuple[int, str]:
        """The id of the round of this step and attempt, and when it was opened: the current one, else one that another node
        has ended since then, but for `others`; else a new one.
        """
        naming.check_step(step)
        with self._write(hasty=True) as session:
            lock_run(session, run).raise_attempt(attempt)
            same = (RoundRow.run == run, RoundRow.step == step, RoundRow.attempt == attempt)
            going = select(RoundRow).where(*same, RoundRow.state.in_(GOING_ON)).order_by(RoundRow.id).limit(1)
            row_round = session.scalar(going)
            if row_round is None and self._shared:
                newest = select(RoundRow.id).where(RoundRow.run == run).order_by(RoundRow.id.desc()).limit(NEWEST)
                ended = (RoundRow.ended >= opened, RoundRow.node != self._node, RoundRow.id.not_in(others))
                row_round = session.scalar(select(RoundRow).where(RoundRow.id.in_(newest), *same, *ended).limit(1))
            if row_round is None:
                row_round = RoundRow(
                    run=run, step=step, attempt=attempt, world=world, state="open", sealed=0, opened=opened, node=self._node
                )
                session.add(row_round)
                session.flush()
            return row_round.id, row_round.opened

    def matches(self, round_id: int, run: str, step: int, attempt: int, opened: str) -> bool:
        """Whether the round of this id is one of this run, step and attempt, opened then."""
        with self._read() as session:
            row = session.get(RoundRow, round_id)
            return row is not None and (row.run, row.step, row.attempt, row.opened) == (run, step, attempt, opened)

    def knows(self, run: str, step: int, attempt: int) -> bool:
        """Whether there is a round of this step and attempt, in any state."""
        same = (RoundRow.run == run, RoundRow.step == step, RoundRow.attempt == attempt)
        with self._read() as session:
            return session.scalar(select(RoundRow.id).where(*same).limit(1)) is not None

    def has_committed(self, run: str, attempt: int) -> bool:
        """Whether a save of this attempt was ever committed."""
        same = (RoundRow.run == run, RoundRow.attempt == attempt)
        with self._read() as session:
            return session.scalar(select(RoundRow.id).where(*same, RoundRow.state == "committed").limit(1)) is not None

    def is_sealed(self, run: str, step: int, attempt: int) -> bool:
        """Whether a round is open that all ranks have sealed."""
        same = (RoundRow.run == run, RoundRow.step == step, RoundRow.attempt == attempt)
        with self._read() as session:
            return session.scalar(select(RoundRow.id).where(*same, RoundRow.state == "sealed")) is not None

    def update(self, round_id: int, *, sealed: int) -> None:
        """Record how many ranks have sealed; does nothing for a round that has ended."""
        with self._write(hasty=True) as session:
            row = _lock_round(session, round_id)
            if row.state in GOING_ON:
                row.seal(sealed)

    def end(
        self,
        round_id: int,
        state: Literal["committed", "aborted", "dropped"],
        now: str,
        code: str | None = None,
        detail: str | None = None,
        **measured: float,
    ) -> bodies.Round | None:
        """End a round and return it, with its measured `SaveTimes`.

        The first end counts; a second one changes nothing and returns None.
        """
        with self._write(hasty=True) as session:
            row = _lock_round(session, round_id)
            if row.state not in GOING_ON:
                return None
            row.end(state, now, code, detail, self._node)
            if measured:
                row.measure(measured)
            return bodies.Round.model_validate(row, from_attributes=True)

    def measure(self, round_id: int, measured: Mapping[str, float]) -> None:
        """Record timings found after a round's end."""
        with self._write() as session:
            _lock_round(session, round_id).measure(measured)

    def settle_committed(self, now: str) -> list[bodies.Round]:
        """End the open rounds whose checkpoint is listed: it was published, and the daemon ended before it recorded that."""
        same = [getattr(CheckpointRow, name) == getattr(RoundRow, name) for name in ("run", "step", "attempt")]
        # Where another round of this launch has committed the step, this one was to replace it. Which one is on disk is
        # unknown, since clocks may be wrong: this one's staged files are saved once more, or reported as lost.
        before = aliased(RoundRow)
        of_step = [getattr(before, name) == getattr(RoundRow, name) for name in ("run", "step", "attempt")]
        first = ~exists().where(*of_step, before.id != RoundRow.id, before.state == "committed")
        published = first & exists().where(*same)
        wanted = select(RoundRow).where(RoundRow.state.in_(GOING_ON), published).order_by(RoundRow.id)
        with self._write() as session:
            rows = session.scalars(wanted.with_for_update()).all()
            for row in rows:
                row.end("committed", now, node=self._node)
            return [bodies.Round.model_validate(row, from_attributes=True) for row in rows]

    def staged(self) -> list[bodies.Round]:
        """The open rounds that all ranks have sealed, only of this node where there may be others."""
        with self._read() as session:
            rows = session.scalars(select(RoundRow).where(RoundRow.state == "sealed", *self._own()).order_by(RoundRow.id))
            return [bodies.Round.model_validate(row, from_attributes=True) for row in rows]

    def abort_open(self, now: str, code: str, detail: str, keep: Collection[int] = ()) -> list[int]:
        """Abort every round that some rank has not sealed, except those to keep, of this node where there may be others;
        return their ids.
        """
        with self._write(hasty=True) as session:
            wanted = (RoundRow.state == "open", RoundRow.id.not_in(keep), *self._own())
            rows = session.scalars(select(RoundRow).where(*wanted).order_by(RoundRow.id).with_for_update()).all()
            for row in rows:
                row.end("aborted", now, code, detail)
            return [row.id for row in rows]

    def _own(self) -> tuple[ColumnElement[bool], ...]:
        return (func.coalesce(RoundRow.node, self._node) == self._node,) if self._shared else ()

    def abort_of_lost_nodes(self, now: str, code: str, detail: str) -> list[bodies.Round]:
        """Abort the open rounds of nodes that are no members now; return them."""
        with self._write() as session:
            live = exists().where(NodeRow.name == RoundRow.node, NodeRow.until > func.clock_timestamp())
            wanted = (RoundRow.state.in_(GOING_ON), RoundRow.node.is_not(None), ~live)
            rows = session.scalars(select(RoundRow).where(*wanted).order_by(RoundRow.id).with_for_update()).all()
            for row in rows:
                row.end("aborted", now, code, detail)
            return [bodies.Round.model_validate(row, from_attributes=True) for row in rows]

    def page(
        self,
        run: str | None = None,
        state: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        within: Within = EVERYTHING,
    ) -> bodies.Page[bodies.Round]:
        """A page of rounds, the newest first; of one run, in one state, within these bounds, if given."""
        with self._read() as session:
            return listing.rounds(session, run, state, within, cursor, limit)

    def counts(self) -> dict[str, int]:
        """How many rounds there are in each state."""
        with self._read() as session:
            counted = session.execute(select(RoundRow.state, func.count()).group_by(RoundRow.state)).all()
        return dict.fromkeys(ROUND_STATES, 0) | {state: count for state, count in counted}

    def failure_counts(self) -> dict[str, int]:
        """How many rounds ended without a checkpoint, by error code."""
        counted = (
            select(RoundRow.code, func.count())
            .where(RoundRow.state.in_(UNSAVED), RoundRow.code.is_not(None))
            .group_by(RoundRow.code)
        )
        with self._read() as session:
            return {str(code): count for code, count in session.execute(counted)}


def _lock_round(session: Session, round_id: int) -> RoundRow:
    row = session.get(RoundRow, round_id, with_for_update=True)
    if row is None:
        raise NoSuchResource(f"there is no save with the round ID {round_id}")
    return row
