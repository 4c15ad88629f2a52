"""Moments as text: RFC 3339, as manifests, the catalog, logs and the REST API write them.

In UTC and of one precision, texts compare as the moments do.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone


def utc_now(timespec: str = "milliseconds") -> str:
    """The moment this is."""
    return write(datetime.now(timezone.utc), timespec)


def write(moment: datetime, timespec: str = "milliseconds") -> str:
    """A moment as text, in UTC."""
    return moment.astimezone(timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")


def read(text: str) -> datetime:
    """The moment that a text names, in UTC, which is also meant where it names no zone; `ValueError`."""
    moment = datetime.fromisoformat(text.upper().replace("Z", "+00:00"))
    if moment.tzinfo is None:
        return moment.replace(tzinfo=timezone.utc)
    try:
        return moment.astimezone(timezone.utc)
    except OverflowError as error:
        raise ValueError(f"{text!r} is outside the years 1 to 9999 in UTC") from error


def later(text: str, seconds: float) -> str:
    """The moment so many seconds after another; before it where they are negative."""
    return write(read(text) + timedelta(seconds=seconds))


def seconds_of(text: str) -> float:
    """Seconds since 1970. What names no moment counts as later than any, so no rule about time removes it."""
    try:
        return read(text).timestamp()
    except ValueError:
        return float("inf")
