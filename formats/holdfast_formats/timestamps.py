"""Times as text: RFC 3339, as in manifests, the catalog, logs and the REST API.

In UTC and of one precision, texts compare as the times do.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from math import isnan

from .errors import InvalidRequest

CLOCKS_APART_S = 5.0  # between machines, as usual; what is further ahead is the time of a clock that was set back


def utc_now(timespec: str = "milliseconds") -> str:
    return write(datetime.now(timezone.utc), timespec)


def write(moment: datetime, timespec: str = "milliseconds") -> str:
    """A time as text, in UTC."""
    return moment.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def read(text: str) -> datetime:
    """The time that a text states, in UTC; a text without a zone means UTC. `ValueError`."""
    moment = datetime.fromisoformat(text.upper().replace("Z", "+00:00"))
    if moment.tzinfo is None:
        return moment.replace(tzinfo=timezone.utc)
    try:
        return moment.astimezone(timezone.utc)
    except OverflowError as error:
        raise ValueError(f"{text!r} is outside the years 1 to 9999 in UTC") from error


def later(text: str, seconds: float) -> str:
    """The time so many seconds after another; before it if they are negative."""
    return write(read(text) + timedelta(seconds=seconds))


def check_seconds(seconds: float | None, name: str) -> None:
    """`InvalidRequest` for NaN as a number of seconds: no time is after it, so what waits for so long never ends."""
    if seconds is not None and isnan(seconds):
        raise InvalidRequest(f"{name} is not a number", hint="pass a number of seconds")


def span(seconds: float) -> str:
    """A duration in one unit: 75 s, 12 min, 3 h, 5 d."""
    for below, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < below:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def seconds_of(text: str) -> float:
    """Seconds since 1970. A text that states no time counts as later than any, so no rule about time
    removes its checkpoint.
    """
    try:
        return read(text).timestamp()
    except ValueError:
        return float("inf")
