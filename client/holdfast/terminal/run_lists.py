"""Sorted lists of runs, with the column that they are sorted by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.read.checkpoint_index import CheckpointIndex, ServiceIndex
from holdfast.terminal import console
from holdfast_formats import metric_values
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.columns import Column

if TYPE_CHECKING:
    from holdfast_formats.rest import bodies
    from holdfast_formats.rest.measurements import RunSummary

METRIC = "metric:"


def runs(library: CheckpointIndex, sort: str, tags: Sequence[str] = ()) -> list[bodies.Run]:
    """The runs of a library that have all these tags, sorted; `InvalidRequest` for what a directory alone cannot provide."""
    if isinstance(library, ServiceIndex):
        return list(library.api.runs(sort=sort, tags=tags))
    if tags:
        raise InvalidRequest("runs of a directory cannot be listed by tag", hint="use a service, with --url")
    if sort == "name":
        return library.runs()
    key = _OF_A_DIRECTORY.get(sort.removeprefix("-"))
    if key is None:
        raise InvalidRequest(
            f"runs of a directory cannot be sorted by {sort!r}",
            hint=f"sort by one of {', '.join(_OF_A_DIRECTORY)}, or use a service, with --url",
        )
    runs_by_name = sorted(library.runs(), key=lambda run: run.name)
    return sorted(runs_by_name, key=key, reverse=sort.startswith("-"))


def extra(library: CheckpointIndex, sort: str) -> Column[bodies.Run] | None:
    """The column that a service sorts by, if lists do not have it already."""
    name = sort.removeprefix("-")
    metric = name.removeprefix(METRIC) if name.startswith(METRIC) else None
    if not isinstance(library, ServiceIndex) or (metric is None and name not in _SHOWN):
        return None
    from holdfast.rest.summaries import summaries

    shown = _SHOWN[name] if metric is None else (lambda run: _number(run.metrics.get(metric)))
    values = {run.run: shown(run) for run in summaries(library.api)}
    return Column(metric or name, lambda run: values.get(run.name), "number")


def _number(value: float | None) -> str:
    return "-" if value is None else metric_values.text(value)


def _newest(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


_OF_A_DIRECTORY: Mapping[str, Callable[[bodies.Run], str | int]] = {
    "name": lambda run: run.name,
    "newest": lambda run: -1 if run.newest is None else run.newest,
    "checkpoints": lambda run: run.checkpoints,
    "storage": lambda run: run.bytes,
}
_SHOWN: Mapping[str, Callable[[RunSummary], str]] = {
    "age": lambda run: "-" if run.good is None else console.human_age(run.good.created),
    "exposed": lambda run: console.human_seconds(run.exposed_s),
    "stall": lambda run: console.human_seconds(_newest(run.trend.stall_s)),
    "goodput": lambda run: _share(_newest(run.trend.goodput)),
}
