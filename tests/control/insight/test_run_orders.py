"""Orders of runs: keys sort as values do, what has none comes last, and what is no order is refused."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as some

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.columns import RUN_SORTS
from holdfast_formats.rest.measurements import Attention, GoodCheckpoint, RunSummary, Trend
from holdfast_formats.timestamps import write
from holdfast_service.control.insight.run_orders import RunOrder, WantedRuns
from tests.wings.notify.test_alerts import summary as summed


def summary(run: str, **values: object) -> RunSummary:
    return summed(run).model_copy(update=values)


METRIC = some.floats(allow_nan=False, allow_infinity=False) | some.none()


@given(some.lists(METRIC, max_size=12), some.booleans())
def test_keys_sort_as_values_do(values: list[float | None], descends: bool) -> None:
    """Equal ones by name; of whatever size and sign, -0.0 too."""
    order = RunOrder.parse(f"{'-' * descends}metric:loss")
    runs = {f"r{n:02d}": value for n, value in enumerate(values)}
    made = [summary(run, metrics={} if value is None else {"loss": value}) for run, value in runs.items()]
    keys = sorted(map(order.key, made))
    known = sorted((run for run in runs if runs[run] is not None), key=lambda run: runs[run] or 0.0, reverse=descends)
    assert [order.run_of(key) for key in keys] == known + [run for run in runs if runs[run] is None]
    assert all(order.is_key(key) for key in keys)


def test_columns_are_what_the_page_shows() -> None:
    """The newest checkpoint is the youngest, a death comes before training, and a value that is unknown is last."""
    now = datetime(2030, 1, 31, tzinfo=timezone.utc)

    def good(hours: int) -> GoodCheckpoint:
        return GoodCheckpoint(step=1, created=write(now - timedelta(hours=hours)), verified=True, copies=[])

    def trend(stall: float | None, goodput: float | None) -> Trend:
        return Trend(steps=[1, 2], states=["committed"] * 2, stall_s=[9.0, stall], goodput=[0.1, goodput])

    a = summary("a", life="training", bytes=5, checkpoints=3, newest=7, exposed_s=2.0, good=good(3), trend=trend(0.5, 0.99))
    b = summary("b", life="died", bytes=9, checkpoints=1, newest=None, exposed_s=None, good=good(1), trend=trend(None, 0.98))
    c = summary("c", life="idle", bytes=1, checkpoints=2, newest=3, exposed_s=0.0, good=None, trend=Trend())
    expected = {
        "state": "bac",
        "age": "bac",
        "-age": "abc",
        "exposed": "cab",
        "-exposed": "acb",
        "stall": "abc",
        "goodput": "bac",
        "-storage": "bac",
        "checkpoints": "bca",
        "newest": "cab",
    }
    for sort, names in expected.items():
        order = RunOrder.parse(sort)
        assert "".join(order.run_of(key) for key in sorted(map(order.key, (a, b, c)))) == names, sort
    assert {sort.removeprefix("-") for sort in expected} | {"name"} == set(RUN_SORTS)


def test_what_is_no_number_is_last() -> None:
    order = RunOrder.parse("metric:loss")
    keys = [order.key(summary(run, metrics={"loss": value})) for run, value in (("a", math.nan), ("b", 1.0))]
    assert [order.run_of(key) for key in sorted(keys)] == ["b", "a"]


def test_training_comes_before_need_where_that_is_asked_for() -> None:
    """Both orders have keys of one form, with the name at the end."""
    lost = summary("lost", life="died", attention=[Attention(level="error", code="run-died", text="t", hint="h")])
    for sort, expected in (("attention", ["lost", "busy", "idle"]), ("training", ["busy", "lost", "idle"])):
        order = RunOrder.parse(sort)
        keys = sorted(map(order.key, (summary("idle", life="idle"), lost, summary("busy", life="training"))))
        assert [order.run_of(key) for key in keys] == expected and all(map(order.is_key, keys))


@pytest.mark.parametrize(
    "sort", ["", "-", "bytes", "--name", "-attention", "-training", "metric", "metric:", "name:x", "name "]
)
def test_what_is_no_order_is_refused(sort: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sorted"):
        RunOrder.parse(sort)


@pytest.mark.parametrize(
    "key", ["", "a", "0" * 17, "2" + "0" * 16 + "a", "0" + "G" * 16 + "a", "0" * 17 + "a b", "0" * 19 + "a\n"]
)
def test_what_is_no_key_is_none(key: str) -> None:
    assert not RunOrder.parse("storage").is_key(key)


def test_every_word_is_somewhere_in_the_name() -> None:
    wanted = WantedRuns.parse("team-", "LLAMA 7b")
    assert wanted.has("team-7B-llama", ()) and not wanted.has("llama-7b", ()) and not wanted.has("team-llama-70", ())
    assert WantedRuns.parse().has("anything", ())
