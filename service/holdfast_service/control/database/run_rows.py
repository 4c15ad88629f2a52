"""The row of a run, locked for a transaction that reads before it writes."""

from __future__ import annotations

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from holdfast_formats import naming
from holdfast_service.control.database.schema import RunRow


def lock_run(session: Session, run: str) -> RunRow:
    """The run's row, created if necessary, locked until this transaction ends."""
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
