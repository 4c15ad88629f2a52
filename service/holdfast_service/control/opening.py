"""Opening a round in the catalog. A trainer waits for it at every save: so its statements are made once, and are plain SQL.

By objects of the ORM it took 5 ms of the processor, half of what a save may hold its trainer up.
"""

from __future__ import annotations

from sqlalchemy import BindParameter, Connection, bindparam, func, insert, select, update

from holdfast_formats.errors import AlreadyCommitted, StaleAttempt

from .listing import GOING_ON
from .schema import CheckpointRow, RoundRow, RunRow, Table

_tables = Table.metadata.tables
_runs, _rounds, _checkpoints = (_tables[row.__tablename__] for row in (RunRow, RoundRow, CheckpointRow))
_run: BindParameter[str] = bindparam("run")
_step: BindParameter[int] = bindparam("step")
_attempt: BindParameter[int] = bindparam("attempt")

_LOCKED = select(_runs.c.attempt).where(_runs.c.name == _run).with_for_update()
_RAISED = update(_runs).where(_runs.c.name == bindparam("named")).values(attempt=bindparam("to"))
# Asked for when the run is locked, in a statement of their own: what other nodes have done by then is in them.
_FOUND = select(
    select(func.count())
    .where(_checkpoints.c.run == _run, _checkpoints.c.step == _step, _checkpoints.c.damage.is_(None))
    .select_from(_checkpoints)
    .scalar_subquery()
    .label("sound"),
    select(func.min(_rounds.c.id))
    .where(_rounds.c.run == _run, _rounds.c.step == _step, _rounds.c.attempt == _attempt, _rounds.c.state.in_(GOING_ON))
    .scalar_subquery()
    .label("known"),
)
_OPENED = insert(_rounds)


def lock(connection: Connection, run: str) -> int | None:
    """The newest attempt of a run, which no other transaction changes until this one ends; None where there is no run."""
    found: int | None = connection.execute(_LOCKED, {"run": run}).scalar_one_or_none()
    return found


def open_round(connection: Connection, of: tuple[str, int, int], newest: int, world: int, now: str) -> int:
    """The id of the round of this run, step and attempt: the one going on, else a new one. The run is locked.

    Raises `StaleAttempt` for an attempt older than the `newest` (I6) and `AlreadyCommitted` when the step is a checkpoint.
    """
    run, step, attempt = of
    if attempt < newest:
        raise StaleAttempt(
            f"attempt {attempt} of {run} is over: attempt {newest} has been declared",
            hint="a newer launch of this run is training; stop this one",
            newest=newest,
        )
    found = connection.execute(_FOUND, {"run": run, "step": step, "attempt": attempt}).one()
    if found.sound:
        raise AlreadyCommitted(f"{run}@{step} is committed already", hint="remove it first to save it anew")
    if attempt > newest:  # after a loss of the catalog a sealed slot may know of an attempt that nobody has declared since
        connection.execute(_RAISED, {"named": run, "to": attempt})
    if found.known is not None:
        return int(found.known)
    row = {"run": run, "step": step, "attempt": attempt, "world": world, "state": "open", "sealed": 0, "opened": now}
    made = connection.execute(_OPENED, row).inserted_primary_key
    assert made is not None, "one row was inserted"
    return int(made[0])
