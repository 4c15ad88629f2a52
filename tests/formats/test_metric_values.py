"""Metrics that are not finite: words for JSON and for people."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from holdfast_formats import metric_values
from holdfast_formats.rest.measurements import MetricValue

GIVEN = {"nan": math.nan, "most": math.inf, "least": -math.inf, "loss": 2.5}


def strict(text: str | bytes) -> object:
    """The document, without the constants that only Python's JSON has."""
    return json.loads(text, parse_constant=lambda name: json.loads(f"no JSON: {name}"))


def same(left: dict[str, float], right: dict[str, float]) -> bool:
    return left.keys() == right.keys() and all(
        left[name] == right[name] or (math.isnan(left[name]) and math.isnan(right[name])) for name in left
    )


@given(st.dictionaries(st.text(max_size=3), st.floats()))
def test_nothing_is_lost(metrics: dict[str, float]) -> None:
    """Split and joined, and written and read, through JSON each time."""
    finite, words = metric_values.split(metrics)
    assert all(map(math.isfinite, finite.values()))
    assert same(metric_values.joined(json.loads(json.dumps(finite)), words), metrics)
    written = json.dumps({name: metric_values.written(value) for name, value in metrics.items()}, allow_nan=False)
    assert same({name: metric_values.read(value) for name, value in json.loads(written).items()}, metrics)


def test_bodies_are_strict_json() -> None:
    """A body writes words and reads them, and two that say the same are equal."""
    adapter = TypeAdapter(dict[str, MetricValue])
    words = {"nan": "NaN", "most": "Infinity", "least": "-Infinity", "loss": 2.5}
    assert strict(adapter.dump_json(GIVEN)) == words == adapter.dump_python(GIVEN)
    assert adapter.validate_json(json.dumps(words)) == adapter.validate_python({**GIVEN, "nan": float("nan")})


def test_people_read_the_words() -> None:
    assert [metric_values.text(value) for value in GIVEN.values()] == ["NaN", "Infinity", "-Infinity", "2.5"]
