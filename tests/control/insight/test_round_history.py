"""The history of saves: each phase is counted once, when it becomes known, whatever the order in which rounds end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import RoundRow
from holdfast_service.control.insight.round_history import PENDING_MAX, SETTLED_S, RoundHistory, Seen
from holdfast_service.observe.metrics import SAVE_BOUNDS_S, Histogram
from tests.control.published import a_row
from tests.databases import sqlite_catalog
from tests.kit.clock import Clock

BEGAN, ENDED = "2030-01-01T00:00:00.000Z", "2030-01-01T00:00:04.000Z"


catalog = sqlite_catalog


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(seconds_of(ENDED) + 1)


@pytest.fixture
def history(catalog: Catalog, clock: Clock[float]) -> RoundHistory:
    made = RoundHistory(catalog.database, "here", clock)
    made.update()
    return made


def note(catalog: Catalog, round_id: int, measured: dict[str, float], node: str | None = None) -> None:
    """What was measured of a round, put where whoever measures puts it."""
    with catalog.database.write() as session:
        row = session.get_one(RoundRow, round_id)
        row.measured, row.node = measured, node


def save(catalog: Catalog, step: int, state: str = "committed") -> int:
    made = catalog.rounds.open("run", step, 1, 2, BEGAN)[0]
    if state == "committed":
        catalog.record_checkpoint(a_row("run", step))
    catalog.rounds.end(made, state, ENDED, None if state == "committed" else "no-space")  # type: ignore[arg-type]
    return made


def counts(history: RoundHistory) -> dict[str, float]:
    """How many values of each phase were counted."""
    phases, _ = history.counted()
    return {phase: total for phase, made in phases.items() if (total := list(made.buckets())[-1][1])}


def test_phases_are_counted_as_they_become_known(catalog: Catalog, history: RoundHistory) -> None:
    """At the end of the round, and later what is found out later; nothing twice."""
    made = save(catalog, 1)
    assert counts(history) == {"durable": 1}
    note(catalog, made, {"stall_s": 0.2, "write_s": 3.0})
    assert counts(history) == {"durable": 1, "stall": 1, "write": 1}
    note(catalog, made, {"stall_s": 0.2, "write_s": 3.0, "verify_s": 1.0, "bytes": 7.0})
    for _ in range(2):
        assert counts(history) == {"durable": 1, "stall": 1, "write": 1, "verify": 1}
    assert history.counted()[0]["durable"].sum == 4.0
    assert history.counted()[1] == (2, 0)  # bytes of the checkpoint, known before the measured ones


def test_what_goes_on_at_the_start_is_counted_when_it_ends(catalog: Catalog) -> None:
    """What had ended before is not, what had begun is."""
    save(catalog, 1)
    going = catalog.rounds.open("run", 2, 1, 2, BEGAN)[0]
    history = RoundHistory(catalog.database, "here", Clock(seconds_of(ENDED) + 1))
    assert counts(history) == {}
    catalog.rounds.end(going, "committed", ENDED)
    assert counts(history) == {"durable": 1}


def test_rounds_that_end_out_of_order(catalog: Catalog, history: RoundHistory) -> None:
    """An older round that ends after a newer one is counted as well."""
    older = catalog.rounds.open("run", 1, 1, 2, BEGAN)[0]
    save(catalog, 2)
    assert counts(history) == {"durable": 1}
    catalog.rounds.end(older, "committed", ENDED)
    assert counts(history) == {"durable": 2}


def test_failures_have_phases_but_were_never_durable(catalog: Catalog, history: RoundHistory) -> None:
    """Of a save that was dropped or failed, what was measured counts."""
    note(catalog, save(catalog, 1, "aborted"), {"stall_s": 0.1})
    assert counts(history) == {"stall": 1}
    assert history.counted()[1] == (0, 0)


def test_other_nodes_saves_are_theirs(catalog: Catalog, history: RoundHistory) -> None:
    """A round that another node wrote is counted there."""
    note(catalog, save(catalog, 1), {"stall_s": 0.1}, node="there")
    note(catalog, save(catalog, 2), {"stall_s": 0.1}, node="here")
    assert counts(history) == {"durable": 1, "stall": 1}


def test_what_is_not_noted_in_time_is_not_awaited(catalog: Catalog, history: RoundHistory, clock: Clock[float]) -> None:
    """After ten minutes nobody asks for a round again; and never for more than so many."""
    made = save(catalog, 1)
    clock.now += SETTLED_S
    assert counts(history) == {"durable": 1}
    note(catalog, made, {"verify_s": 1.0})
    assert counts(history) == {"durable": 1}
    for step in range(2, PENDING_MAX // 100):
        catalog.rounds.open("run", step, 1, 2, BEGAN)
    history.update()
    assert len(history._pending) <= PENDING_MAX


def test_listeners_hear_of_each_end(catalog: Catalog, history: RoundHistory) -> None:
    """Once of the end, and once of each phase that becomes known later."""
    heard: list[Seen] = []
    history.seen.subscribe(heard.append)
    made = save(catalog, 1)
    history.update()
    note(catalog, made, {"verify_s": 1.0})
    history.update()
    assert [(seen.first, set(seen.new)) for seen in heard if seen.new] == [(True, {"durable"}), (False, {"verify"})]
    assert heard[0].ended - heard[0].opened == 4.0


@given(st.lists(st.floats(0, 1000)))
def test_histogram_buckets(values: list[float]) -> None:
    """A bucket counts the values at or below its bound, the last one all of them."""
    made = Histogram(SAVE_BOUNDS_S)
    for value in values:
        made.add(value)
    buckets = list(made.buckets())
    assert [count for _, count in buckets[:-1]] == [sum(v <= bound for v in values) for bound in SAVE_BOUNDS_S]
    assert buckets[-1] == ("+Inf", len(values))
    assert made.sum == sum(values)
