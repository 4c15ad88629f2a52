"""Lists: every filter against the plain meaning of it, and cursors while others add and remove."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog import listing
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.listing import ROUND_STATES, Within
from holdfast_service.control.database.schema import CheckpointRow
from holdfast_service.control.insight.summary_queries import EVERY_RUN, Summaries
from holdfast_service.storage import MemoryTier, stored_in
from tests.control.published import a_row

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
STEPS = st.integers(0, 12)
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
_runs = itertools.count(1)


def at(minute: int) -> str:
    return (START + timedelta(minutes=minute)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def pages(ask: Callable[[str | None], bodies.Page[Any]], between: Callable[[int], None] = lambda _: None) -> list[Any]:
    """All items of a list, page by page; `between` is done before every page but the first."""
    items, cursor = [], None
    for number in itertools.count():
        page = ask(cursor)
        items += page.items
        cursor = page.next
        if cursor is None:
            return items
        between(number)
    raise AssertionError


FACTS = st.fixed_dictionaries(
    {"verified": st.booleans(), "healthy": st.sampled_from([None, True, False]), "damage": st.sampled_from([None, {"x": 1}])}
)
BOUNDS = st.builds(
    Within,
    step_min=st.none() | STEPS,
    step_max=st.none() | STEPS,
    since=st.none() | STEPS.map(at),
    steps=st.none() | st.sets(STEPS),
    sort=st.just("-step"),
)


def lets_through(within: Within, step: int, made: str) -> bool:
    """What `within` means."""
    return (
        (within.step_min is None or step >= within.step_min)
        and (within.step_max is None or step <= within.step_max)
        and (within.since is None or made >= within.since)
        and (within.steps is None or step in within.steps)
    )


@SHARED
@given(
    held=st.dictionaries(STEPS, FACTS),
    state=st.sampled_from([None, *get_args(bodies.CheckpointState)]),
    within=BOUNDS,
    limit=st.integers(1, 4),
)
def test_filtered_checkpoints(
    catalog: Catalog, held: dict[int, dict[str, Any]], state: str | None, within: Within, limit: int
) -> None:
    """Every page together are exactly those that all filters let through, newest first."""
    run = f"run-{next(_runs)}"
    catalog.set_keep_last(run, None)
    made = [a_row(run, step).model_copy(update={**facts, "created": at(step)}) for step, facts in held.items()]
    for checkpoint in made:
        catalog.record_checkpoint(checkpoint)
    found = pages(lambda cursor: catalog.checkpoints(run, cursor, limit, state, within))
    wanted = [c for c in made if state in (None, c.state) and lets_through(within, c.step, c.created)]
    assert found == sorted(wanted, key=lambda checkpoint: -checkpoint.step)


@SHARED
@given(
    opened=st.lists(st.tuples(st.sampled_from("ab"), STEPS, st.sampled_from(ROUND_STATES)), max_size=12),
    of=st.sampled_from([None, "a", "b"]),
    state=st.sampled_from([None, *ROUND_STATES]),
    within=BOUNDS.map(lambda within: within._replace(steps=None)),
    limit=st.integers(1, 4),
)
def test_filtered_rounds(
    catalog: Catalog, opened: list[tuple[str, int, str]], of: str | None, state: str | None, within: Within, limit: int
) -> None:
    """Every page together are exactly those that all filters let through, the newest round first."""
    number = next(_runs)
    for run in "ab":
        catalog.set_keep_last(f"{run}-{number}", None)
    made = []
    for attempt, (run, step, ended) in enumerate(opened, 1):
        round_id = catalog.rounds.open(f"{run}-{number}", step, attempt, 1, at(attempt))[0]
        if ended == "sealed":
            catalog.rounds.update(round_id, sealed=1)
        elif ended != "open":
            catalog.rounds.end(round_id, ended, at(attempt))  # type: ignore[arg-type]
        made.append((round_id, run, ended, step, at(attempt)))
    run = None if of is None else f"{of}-{number}"
    found = pages(lambda cursor: catalog.rounds.page(run, state, cursor, limit, within))
    wanted = [
        round_id
        for round_id, run, ended, step, since in made
        if of in (None, run) and state in (None, ended) and lets_through(within, step, since)
    ]
    ours = {round_id for round_id, *_ in made}
    assert [one.id for one in found if one.id in ours] == sorted(wanted, reverse=True)


@SHARED
@given(
    before=st.sets(st.integers(0, 40), min_size=1),
    acts=st.lists(st.tuples(st.booleans(), st.integers(0, 40))),
    limit=st.integers(1, 5),
)
def test_what_changes_between_pages_neither_repeats_nor_hides(
    catalog: Catalog, before: set[int], acts: list[tuple[bool, int]], limit: int
) -> None:
    """What was there all the time is seen exactly once, whatever is added and removed meanwhile."""
    run, touched = f"run-{next(_runs)}", set()
    for step in before:
        catalog.record_checkpoint(a_row(run, step))
    left = iter(acts)

    def between(_: int) -> None:
        for add, step in itertools.islice(left, 2):
            touched.add(step)
            if add:
                catalog.record_checkpoint(a_row(run, step))
            else:
                catalog.forget_checkpoint(run, step)

    seen = [made.step for made in pages(lambda cursor: catalog.checkpoints(run, cursor, limit), between)]
    assert seen == sorted(set(seen), reverse=True)
    assert before - touched <= set(seen) <= before | touched


def test_runs_between_pages(catalog: Catalog) -> None:
    """Runs that begin or lose their checkpoints between two pages move no other."""
    for name in ("b", "d", "f"):
        catalog.record_checkpoint(a_row(name, 1))
    summaries = Summaries(stored_in(MemoryTier()).store, catalog)
    first = summaries.names(None, 1, EVERY_RUN)
    for name in ("a", "c"):
        catalog.set_keep_last(name, None)
    catalog.forget_checkpoint("d", 1)
    behind = pages(lambda cursor: summaries.names(cursor or first.next, 1, EVERY_RUN))
    assert first.items + behind == ["b", "c", "d", "f"]
    assert [run.checkpoints for run in summaries.runs(behind)] == [0, 0, 1]


def test_the_newest_of_a_run_is_not_damaged(catalog: Catalog) -> None:
    """Damaged ones count and weigh, but none of them is what a run is resumed from."""
    for run, damaged in (("all", (1, 2, 3)), ("last", (3, 2)), ("first", (1,)), ("none", ())):
        for step in (1, 2, 3):
            known = {"damage": {"code": "corrupt-extent"}} if step in damaged else {}
            catalog.record_checkpoint(a_row(run, step).model_copy(update=known))
    expected = {"all": (None, 3), "last": (1, 3), "first": (3, 3), "none": (3, 3)}
    for runs in (Summaries(stored_in(MemoryTier()).store, catalog).runs(list(expected)), map(catalog.run, expected)):
        assert {run.name: (run.newest, run.checkpoints) for run in runs} == expected


def test_many_labelled_steps(catalog: Catalog) -> None:
    """More steps than a query takes are asked for in parts."""
    for step in range(0, 3000, 100):
        catalog.record_checkpoint(a_row("run", step))
    within = Within(steps=range(0, 3000, 2), step_min=150)
    found = pages(lambda cursor: catalog.checkpoints("run", cursor, 7, within=within))
    assert [made.step for made in found] == list(range(2900, 100, -100))
    assert catalog.checkpoints("run", None, 10, within=Within(steps=())).items == []


@pytest.mark.parametrize(
    ("given_", "begins"),
    [
        ("2030-01-01T12:00:00Z", "2030-01-01T12:00:00.000"),
        ("2030-01-01T12:00:00.5+02:00", "2030-01-01T10:00:00.500"),
        ("2030-01-01 12:00", "2030-01-01T12:00:00.000"),
        ("2030-01-01", "2030-01-01T00:00:00.000"),
    ],
)
def test_times(given_: str, begins: str) -> None:
    """Any zone becomes UTC; none is UTC; what is compared is a beginning, so that `Z` and fractions do not matter."""
    if given_.endswith("+02:00"):
        given_ = given_.replace(".5+", ".500000+")  # Python 3.10 reads no other fractions
    assert listing.parse_time(given_) == begins


@pytest.mark.parametrize("text", ["", "yesterday", "2030-13-01", "0001-01-01T00:00:00+14:00"])
def test_what_is_no_time_is_refused(catalog: Catalog, text: str) -> None:
    """By name, before anything is asked."""
    catalog.set_keep_last("run", None)
    for ask in (
        lambda: catalog.checkpoints("run", None, 10, within=Within(since=text)),
        lambda: catalog.rounds.page(within=Within(since=text)),
    ):
        with pytest.raises(InvalidRequest, match="is not a time"):
            ask()


def test_unknown_states_are_refused(catalog: Catalog) -> None:
    """A state that no checkpoint can be in."""
    with pytest.raises(InvalidRequest, match="verified"):
        catalog.checkpoints("run", None, 10, "sound")


def test_the_few_are_found_by_an_index(catalog: Catalog) -> None:
    """Among many checkpoints, the few that are damaged, unhealthy or unverified are not looked for one by one."""
    for step in range(60):
        catalog.record_checkpoint(a_row("run", step, verified=True))
    with catalog.database.write() as session:
        session.execute(update(CheckpointRow).where(CheckpointRow.step == 3).values(damage={"code": "corrupt-extent"}))
        if session.get_bind().dialect.name == "postgresql":
            return  # its planner goes by numbers, and there are too few rows here
        for condition, index in (
            ("damage IS NOT NULL", "checkpoints_damaged"),
            ("healthy IS 0 AND damage IS NULL", "checkpoints_unhealthy"),
            ("verified IS 0 AND damage IS NULL", "checkpoints_unverified"),
        ):
            query = f"EXPLAIN QUERY PLAN SELECT * FROM checkpoints WHERE run = 'run' AND {condition} ORDER BY step DESC"
            plan = session.connection().exec_driver_sql(query).all()
            assert index in str(plan), plan
