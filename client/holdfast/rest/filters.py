"""Filters for lists. All given conditions must hold."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, NamedTuple

from holdfast_formats import timestamps
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast_formats.rest import bodies

_AGO = re.compile(r"(\d{1,6})(s|min|h|d|w)")
_DAYS_AGO = {"today": 0, "yesterday": 1}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Filter(NamedTuple):
    """Checkpoints or rounds by step, time, state; checkpoints by label too. `since` is RFC 3339: 2030-01-31T12:00:00Z."""

    label: str | None = None
    state: str | None = None
    step_min: int | None = None
    step_max: int | None = None
    since: str | None = None

    def query(self) -> dict[str, str | None]:
        """The parameters of a request, without those that are not given."""
        return {name: str(value) for name, value in self._asdict().items() if value is not None}

    def lets_through(self, checkpoint: bodies.CheckpointInfo) -> bool:
        """Whether a checkpoint's step and time match; `InvalidRequest` for conditions that only a service can check."""
        if self.label is not None or self.state is not None:
            raise InvalidRequest(
                "filters by label and state need a running service", hint="leave --root out, or start `holdfast serve`"
            )
        if self.since is not None and _time(checkpoint.created) < _time(self.since):
            return False
        low, high = self.step_min, self.step_max
        return (low is None or checkpoint.step >= low) and (high is None or checkpoint.step <= high)


NO_FILTER = Filter()


def since(text: str | None, now: datetime | None = None) -> str | None:
    """Parse a time (`2030-01-31`, `2030-01-31T12:00`), an age (`90min`, `12h`, `3d`), or `today` or `yesterday`, whose
    beginnings are meant, in UTC, into RFC 3339; `InvalidRequest`.
    """
    if text is None:
        return None
    now, ago = now or datetime.now(timezone.utc), _AGO.fullmatch(text)
    if ago is not None:
        return timestamps.write(now - timedelta(seconds=int(ago[1]) * _SECONDS[ago[2]]), "seconds")
    if text in _DAYS_AGO:
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return timestamps.write(midnight - timedelta(days=_DAYS_AGO[text]), "seconds")
    return timestamps.write(_time(text), "auto")


def _time(text: str) -> datetime:
    try:
        return timestamps.read(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{text!r} is not a time",
            hint="write 2030-01-31T12:00 in UTC, how long ago (90min, 12h, 3d), today or yesterday",
        ) from error
