"""Tables as CSV: the API's lists and their columns. As JSON they are the lists themselves."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_formats.printable import spreadsheet_cell
from holdfast_formats.rest import bodies

ROWS_MAX = 20_000


class DownloadTable(NamedTuple):
    """A list of the API. `more` is its path below the run, or the checkpoint; `filters` are the parameters it takes."""

    more: str
    columns: tuple[str, ...]
    filters: tuple[str, ...] = ()
    more_of: Callable[[dict[str, Any]], dict[str, Any]] = dict  # columns that follow from the others


_SUMMARY = ("run", "state", "newest", "checkpoints", "bytes", "last_commit", "exposed_s", "stall_p50_s", "stall_p95_s")
_CHECKPOINT = ("step", "state", "created", "bytes", "tensors", "groups", "metrics", "pinned", "labels", "attempt", "world")
_DIFFERENCE = ("group", "name", "state", "dtype", "shape", "bytes", "norm_a", "norm_b", "change", "relative")
_STATISTICS = ("group", "name", "dtype", "elements", "nan", "inf", "minimum", "maximum", "mean", "rms", "zeros", "change")
_JOB = ("id", "kind", "run", "step", "state", "created", "started", "ended", "done_bytes", "total_bytes", "node", "problem")
_NODE = ("name", "host", "state", "ranks", "runs", "arena_bytes", "duties", "sealed", "started", "version", "url")
_ROUND = ("run", "step", "attempt", "state", "sealed", "world", "opened", "ended", "node", "code", "detail")


def _with_state(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "state": bodies.CheckpointInfo.model_validate(row).state}


OF_ALL = {
    "runs": DownloadTable(
        "/v1/summaries", (*_SUMMARY, "goodput_lost", "failed", "dropped", "saves", "metrics"), ("prefix", "q", "sort")
    ),
    "jobs": DownloadTable("/v1/jobs", _JOB, ("state", "kind", "run")),
    "events": DownloadTable("/v1/events", ("id", "at", "level", "kind", "run", "step", "node", "text"), ("run", "kind")),
    "nodes": DownloadTable("/v1/nodes", _NODE),
    "quotas": DownloadTable("/v1/quotas", ("pattern", "used_bytes", "quota_bytes", "runs")),
    "saves": DownloadTable("/v1/rounds", _ROUND, ("run", "state", "step_min", "step_max", "since")),
    "tokens": DownloadTable("/v1/tokens", ("name", "scope", "runs", "created", "used", "expires", "revoked")),
}
OF_RUN = {
    "checkpoints": DownloadTable(
        "checkpoints", _CHECKPOINT, ("label", "state", "step_min", "step_max", "since", "sort"), _with_state
    ),
    "compare": DownloadTable("compare", _DIFFERENCE, ("a", "b", "run_b", "group", "state", "q")),
}
OF_CHECKPOINT = {
    "files": DownloadTable("files", ("name", "bytes", "stored", "digest")),
    "tensors": DownloadTable("tensors", ("group", "name", "dtype", "shape", "bytes", "file", "placement"), ("group",)),
    "statistics": DownloadTable("statistics", _STATISTICS, ("group", "q", "sort")),
}


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and the rows, without spreadsheet formulas and terminal control characters."""
    written = io.StringIO()
    writer = csv.writer(written)
    names = list(columns)
    writer.writerow(names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return written.getvalue()


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, list) and all(isinstance(one, (str, int)) for one in value):
        value = " ".join(map(str, value))
    elif isinstance(value, dict) and all(not isinstance(one, (list, dict)) for one in value.values()):
        value = " ".join(f"{name}={one}" for name, one in value.items())
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    return spreadsheet_cell(value)
