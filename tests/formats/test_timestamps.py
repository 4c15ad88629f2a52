"""moments: RFC 3339 is written in one way, and read as people and other programs write it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from holdfast_formats import timestamps
from holdfast_formats.errors import InvalidRequest


@pytest.mark.parametrize(
    "text",
    [
        "2030-01-31T12:00:00.500Z",
        "2030-01-31t12:00:00.500z",
        "2030-01-31T12:00:00.500",
        "2030-01-31 13:00:00.500+01:00",
    ],
)
def test_a_moment_is_read_in_any_zone(text: str) -> None:
    """It comes out in UTC, which is also meant where no zone is named."""
    found = timestamps.read(text)
    assert found == datetime(2030, 1, 31, 12, 0, 0, 500_000, timezone.utc)
    assert found.utcoffset() == timedelta()
    assert timestamps.write(found) == "2030-01-31T12:00:00.500Z"


@pytest.mark.parametrize("text", ["yesterday", "", "12:00", "2030-02-31", "0001-01-01T00:00:00+01:00"])
def test_what_names_no_moment(text: str) -> None:
    """Is refused, also where UTC has no such year; a rule about time takes it for later than any."""
    with pytest.raises(ValueError):
        timestamps.read(text)
    assert timestamps.seconds_of(text) == float("inf")


def test_a_moment_in_another_zone_is_written_in_utc() -> None:
    """As precisely as is asked."""
    at = datetime(2030, 1, 1, 1, 2, 3, 4567, timezone(timedelta(hours=2)))
    assert timestamps.write(at) == "2029-12-31T23:02:03.004Z"
    assert timestamps.write(at, "seconds") == "2029-12-31T23:02:03Z"
    assert timestamps.write(at, "auto") == "2029-12-31T23:02:03.004567Z"


def test_later_and_earlier() -> None:
    """Seconds after a moment, or before it."""
    assert timestamps.later("2030-01-01T00:00:00Z", 1.5) == "2030-01-01T00:00:01.500Z"
    assert timestamps.later("2030-01-01T00:00:00.000Z", -0.001) == "2029-12-31T23:59:59.999Z"


def test_seconds_of_a_moment() -> None:
    """Since 1970, whatever its zone."""
    assert (
        timestamps.seconds_of("1970-01-01T00:01:00.500Z") == timestamps.seconds_of("1970-01-01T01:01:00.500+01:00") == 60.5
    )


def test_now_is_between_two_looks_at_the_clock() -> None:
    """And has milliseconds."""
    before = datetime.now(timezone.utc)
    text = timestamps.utc_now()
    assert before - timedelta(milliseconds=1) < timestamps.read(text) <= datetime.now(timezone.utc)
    assert len(text) == len("2030-01-01T00:00:00.000Z")


def test_what_is_no_number_of_seconds_is_refused() -> None:
    """NaN by its name; any number, without a limit too, is one."""
    for seconds in (None, 0, -1.0, 1.5, float("inf")):
        timestamps.check_seconds(seconds, "timeout")
    with pytest.raises(InvalidRequest, match="timeout is not a number"):
        timestamps.check_seconds(float("nan"), "timeout")
