"""Orders and filters of lists of runs. Pure: summaries in, keys out.

A key is text that sorts as its run does in the list, with the run's name at its end; a cursor is the key of the last run.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple, get_args

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.columns import RUN_SORTS
from holdfast_formats.rest.measurements import RunLife, RunSummary
from holdfast_formats.tags import check_tags
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.insight.attention import weight

ATTENTION, TRAINING, METRIC = "attention", "training", "metric"
_NEEDS = (ATTENTION, TRAINING)
_FAR_S = 10**12  # later than any commit, in seconds since 1970
_NAME = "[A-Za-z0-9._-]{1,128}"
_NEED, _VALUE = "[0-9]{19}", "0[0-9a-f]{16}|10{16}"
_LIVES: tuple[RunLife, ...] = ("died", "training", "idle", "finished", "failed", "archived")
assert set(_LIVES) == set(get_args(RunLife))


class RunOrder(NamedTuple):
    """By a column of `RUN_SORTS`, by need for attention (those that train first, or not), or by a metric. Runs without a
    value come last either way.
    """

    column: str = "name"
    descends: bool = False
    metric: str = ""

    @classmethod
    def parse(cls, text: str) -> RunOrder:
        """`storage`, `-storage`, `metric:loss`; `InvalidRequest` for anything else."""
        descends = text.startswith("-")
        column, _, metric = text.removeprefix("-").partition(":")
        is_one = bool(metric) if column == METRIC else column in RUN_SORTS or (column in _NEEDS and not descends)
        if not is_one or (metric and column != METRIC):
            hint = (
                f"use one of {', '.join(RUN_SORTS)}, each with a minus for the largest first; metric:NAME, "
                "attention, training"
            )
            raise InvalidRequest(f"runs cannot be sorted by {text!r}", hint=hint)
        return cls(column, descends, metric)

    @property
    def by_name(self) -> bool:
        return self.column == "name"

    @property
    def kind(self) -> str:
        """The order's name in cursors, so that those of another order are refused."""
        return f"{'-' * self.descends}{self.column}{self.metric and '=' + self.metric.replace(':', '=')}"

    def key(self, summary: RunSummary) -> str:
        """See the module; not for the order by name."""
        if self.column in _NEEDS:
            return _by_need(summary, self.column == TRAINING)
        value = summary.metrics.get(self.metric) if self.column == METRIC else _VALUES[self.column](summary)
        if value is None or not isfinite(value):
            return f"1{0:016x}{summary.run}"
        return f"0{_sortable(value, self.descends):016x}{summary.run}"

    def is_key(self, text: str) -> bool:
        return re.fullmatch(f"(?:{_NEED if self.column in _NEEDS else _VALUE}){_NAME}", text) is not None

    def run_of(self, key: str) -> str:
        return key if self.by_name else key[19:] if self.column in _NEEDS else key[17:]


BY_NAME = RunOrder()


class WantedRuns(NamedTuple):
    """Runs whose names begin with `prefix` and contain every one of the words, ignoring case, in an order; with those that
    `failed` to start, or without; and with all these tags.
    """

    prefix: str = ""
    words: tuple[str, ...] = ()
    order: RunOrder = BY_NAME
    failed: bool = True
    tags: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, prefix: str = "", q: str = "", sort: str = "name", failed: bool = True, tags: Iterable[str] = ()
    ) -> WantedRuns:
        return cls(prefix, tuple(q.lower().split()), RunOrder.parse(sort), failed, check_tags(tags))

    @property
    def every(self) -> bool:
        """Whether it includes all runs."""
        return not self.prefix and not self.words and not self.tags

    def has(self, run: str, tags: Collection[str]) -> bool:
        """Whether it includes the run with these tags."""
        words = all(word in run.lower() for word in self.words)
        return words and run.startswith(self.prefix) and all(tag in tags for tag in self.tags)


def _newest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


_VALUES: Mapping[str, Callable[[RunSummary], float | None]] = {
    "state": lambda run: float(_LIVES.index(run.life)),
    "age": lambda run: None if run.good is None else -seconds_of(run.good.created),
    "exposed": lambda run: run.exposed_s,
    "stall": lambda run: _newest(run.trend.stall_s),
    "goodput": lambda run: _newest(run.trend.goodput),
    "storage": lambda run: float(run.bytes),
    "checkpoints": lambda run: float(run.checkpoints),
    "newest": lambda run: None if run.newest is None else float(run.newest),
}
assert {*_VALUES, "name"} == set(RUN_SORTS)


def _sortable(value: float, descends: bool) -> int:
    """64 bits that sort as the numbers do, or reversed."""
    (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # -0.0 is 0.0
    ordered = bits ^ (2**64 - 1 if bits >> 63 else 2**63)
    return int(ordered ^ (2**64 - 1)) if descends else int(ordered)


def _by_need(summary: RunSummary, training_first: bool) -> str:
    """First runs that need attention, then active ones by name, then the newest commits."""
    errors, warnings = weight(summary)
    at = seconds_of(summary.last_commit) if summary.last_commit is not None else 0.0
    age = 0 if summary.life == "training" else _FAR_S - 1 - int(min(max(at, 0.0), _FAR_S - 2.0))
    need = f"{999 - min(errors, 999):03d}{999 - min(warnings, 999):03d}"
    rests = int(summary.life != "training")
    return f"{rests}{need}{age:012d}{summary.run}" if training_first else f"{need}{rests}{age:012d}{summary.run}"
