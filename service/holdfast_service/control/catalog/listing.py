"""Lists of the catalog: filtered pages of checkpoints and saves, without counting earlier items, and names of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Select, Text, and_, false, func, or_, select, type_coerce
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_formats import naming, timestamps
from holdfast_formats.errors import InvalidRequest, LimitExceeded, NoSuchRun
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.pages import bounded, decode_cursor, integer, page
from holdfast_service.control.database.schema import OCCUPIED, CheckpointRow, RoundRow, RunRow

STEPS_AT_ONCE = 500  # of a query that names steps
_Rows = TypeVar("_Rows", bound=Select[Any])

GOING_ON = ("open", "sealed")
ENDED = ("committed", "aborted", "dropped")
ROUND_STATES = (*GOING_ON, *ENDED)

_SOUND = CheckpointRow.damage.is_(None)
_LIVING = CheckpointRow.abandoned.is_(False)
_NOT_UNHEALTHY = or_(CheckpointRow.healthy.is_(None), CheckpointRow.healthy.is_(True))
# What `rest.Checkpoint.state` says, in SQL; a test compares the two.
_STATES: dict[str, ColumnElement[bool]] = {
    "damaged": CheckpointRow.damage.is_not(None),
    "abandoned": and_(CheckpointRow.abandoned.is_(True), _SOUND),
    "unhealthy": and_(CheckpointRow.healthy.is_(False), _SOUND, _LIVING),
    "verified": and_(CheckpointRow.verified.is_(True), _NOT_UNHEALTHY, _SOUND, _LIVING),
    "committed": and_(CheckpointRow.verified.is_(False), _NOT_UNHEALTHY, _SOUND, _LIVING),
}


SORTED_BY: dict[str, InstrumentedAttribute[Any]] = {
    "step": CheckpointRow.step,
    "created": CheckpointRow.created,
    "bytes": CheckpointRow.bytes,
    "tensors": CheckpointRow.tensors,
}


class Within(NamedTuple):
    """A filter and an order of a list. `since` is an RFC 3339 time; `steps` restricts to these steps; `sort` is a column of
    `SORTED_BY`, with a minus for descending.
    """

    step_min: int | None = None
    step_max: int | None = None
    since: str | None = None
    steps: Collection[int] | None = None
    sort: str = "-step"


EVERYTHING = Within()


def named(prefix: str, words: Iterable[str], tags: Iterable[str] = ()) -> Select[str]:
    """Names of the runs that begin with `prefix`, contain every one of the words, ignoring case, and have all these tags."""
    wanted = select(RunRow.name).where(*(RunRow.name.icontains(word, autoescape=True) for word in words))
    for tag in tags:  # LIKE ignores case on SQLite
        wanted = wanted.where(func.replace(type_coerce(RunRow.tags, Text), f" {tag} ", "") != type_coerce(RunRow.tags, Text))
    if not prefix:
        return wanted
    if not naming.is_run_name(prefix):
        return wanted.where(false())  # it may be text that the database refuses
    behind = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # names are ASCII
    return wanted.where(RunRow.name >= prefix, RunRow.name < behind)


def summed(session: Session, row: RunRow) -> bodies.Run:
    """The run with number and occupied bytes of its checkpoints, and the newest step that is not damaged or abandoned."""
    of = CheckpointRow.run == row.name
    count, size = session.execute(select(func.count(), func.sum(OCCUPIED)).where(of)).one()
    newest = session.scalar(select(func.max(CheckpointRow.step)).where(of, _SOUND, _LIVING))
    return bodies.Run(
        name=row.name, attempt=row.attempt, keep_last=row.keep_last, checkpoints=count, newest=newest, bytes=int(size or 0)
    )


def checkpoints(
    session: Session, run: str, cursor: str | None, limit: int, state: str | None = None, within: Within = EVERYTHING
) -> bodies.Page[bodies.CheckpointInfo]:
    """A page of a run's checkpoints, newest step first by default; `NoSuchRun`."""
    check_name(run)
    if within.sort != "-step":
        return _sorted_checkpoints(session, run, cursor, limit, _in_state(_of_run(run, within), state), within)
    before = decode_cursor("step", cursor)
    within = within if before is None else _below(within, integer(before))
    wanted = _in_state(_of_run(run, within), state).order_by(CheckpointRow.step.desc())
    more = bounded(limit) + 1
    found: list[bodies.CheckpointInfo] = []
    for steps in _in_parts(within):
        part = wanted if steps is None else wanted.where(CheckpointRow.step.in_(steps))
        found += [checkpoint(row) for row in session.scalars(part.limit(more - len(found)))]
        if len(found) == more:
            break
    if not found:
        check_known(session, run)
    return page("step", found, limit, lambda made: made.step)


def _sorted_checkpoints(
    session: Session, run: str, cursor: str | None, limit: int, wanted: Select[Any], within: Within
) -> bodies.Page[bodies.CheckpointInfo]:
    """In another order. A cursor names the last item by its value and its step, so inserts move nothing."""
    name, descends = within.sort.removeprefix("-"), within.sort.startswith("-")
    column = SORTED_BY.get(name)
    if column is None:
        raise InvalidRequest(f"checkpoints cannot be sorted by {name!r}", hint=f"one of {', '.join(SORTED_BY)}")
    if within.steps is not None:
        if len(within.steps) > STEPS_AT_ONCE:
            raise LimitExceeded(
                f"more than {STEPS_AT_ONCE} checkpoints have the label", hint="list them by step, or narrow the steps"
            )
        wanted = wanted.where(CheckpointRow.step.in_(within.steps))
    behind = decode_cursor(within.sort, cursor)
    if behind is not None:
        text, _, step = behind.rpartition("@")
        value: str | int = text if name == "created" else integer(text)
        after = column < value if descends else column > value
        tied = CheckpointRow.step < integer(step) if descends else CheckpointRow.step > integer(step)
        wanted = wanted.where(or_(after, and_(column == value, tied)))
    order = (column.desc(), CheckpointRow.step.desc()) if descends else (column, CheckpointRow.step)
    checkpoints = [checkpoint(row) for row in session.scalars(wanted.order_by(*order).limit(bounded(limit) + 1))]
    if not checkpoints:
        check_known(session, run)
    return page(within.sort, checkpoints, limit, lambda made: f"{getattr(made, name)}@{made.step}")


def _of_run(run: str, within: Within) -> Select[Any]:
    return _bounded_to(select(CheckpointRow).where(CheckpointRow.run == run), CheckpointRow, within)


def _in_state(wanted: Select[Any], state: str | None) -> Select[Any]:
    if state is None:
        return wanted
    if state not in _STATES:
        raise InvalidRequest(f"{state!r} is not a checkpoint state", hint=f"one of {', '.join(_STATES)}")
    return wanted.where(_STATES[state])


def rounds(
    session: Session, run: str | None, state: str | None, within: Within, cursor: str | None, limit: int
) -> bodies.Page[bodies.Round]:
    """A page of rounds, the newest first, of one run or in one state if given."""
    before = decode_cursor("round", cursor)
    wanted = _bounded_to(select(RoundRow), RoundRow, within).order_by(RoundRow.id.desc()).limit(bounded(limit) + 1)
    if before is not None:
        wanted = wanted.where(RoundRow.id < integer(before))
    if state is not None:
        if state not in ROUND_STATES:
            raise InvalidRequest(f"{state!r} is not the state of a save", hint=f"one of {', '.join(ROUND_STATES)}")
        wanted = wanted.where(RoundRow.state == state)
    if run is not None:
        check_name(run)
        wanted = wanted.where(RoundRow.run == run)
    found = [bodies.Round.model_validate(row, from_attributes=True) for row in session.scalars(wanted)]
    if run is not None and not found:
        check_known(session, run)
    return page("round", found, limit, lambda round_: round_.id)


def checkpoint(row: CheckpointRow) -> bodies.CheckpointInfo:
    return bodies.CheckpointInfo.model_validate(row, from_attributes=True)


def check_name(run: str) -> None:
    """`NoSuchRun` for what can be no run, and may be text that the database refuses."""
    if not naming.is_run_name(run):
        raise no_such_run(run)


def check_known(session: Session, run: str) -> None:
    """`NoSuchRun` for a run that the catalog does not know, and for an invalid name."""
    if not naming.is_run_name(run) or session.get(RunRow, run) is None:
        raise no_such_run(run)


def no_such_run(run: str) -> NoSuchRun:
    return NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")


def parse_time(text: str) -> str:
    """RFC 3339 to the prefix of the catalog's times, so that comparing texts compares times. Without a zone it is UTC."""
    try:
        return timestamps.write(timestamps.read(text)).removesuffix("Z")  # a Z would come behind any fraction
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not a time", hint="write it as 2030-01-31T12:00:00Z") from error


def _bounded_to(wanted: _Rows, table: type[CheckpointRow] | type[RoundRow], within: Within) -> _Rows:
    created = table.created if table is CheckpointRow else RoundRow.opened
    if within.step_min is not None:
        wanted = wanted.where(table.step >= within.step_min)
    if within.step_max is not None:
        wanted = wanted.where(table.step <= within.step_max)
    if within.since is not None:
        wanted = wanted.where(created >= parse_time(within.since))
    return wanted


def _below(within: Within, step: int) -> Within:
    highest = step - 1
    return within._replace(step_max=highest if within.step_max is None else min(highest, within.step_max))


def _in_parts(within: Within) -> Iterable[Sequence[int] | None]:
    """The named steps, newest first, in chunks that one query takes; None where all are wanted."""
    if within.steps is None:
        yield None
        return
    low, high = within.step_min, within.step_max
    steps = sorted((s for s in set(within.steps) if (low is None or s >= low) and (high is None or s <= high)), reverse=True)
    for first in range(0, len(steps), STEPS_AT_ONCE):
        yield steps[first : first + STEPS_AT_ONCE]
