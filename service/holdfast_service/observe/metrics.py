"""Every metric the service exposes, declared in one table, and the histograms behind some of them. `logs` is how it logs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

RUNS_MAX = 200  # metrics by run are of so many runs, those that have saved last

# Upper bounds of histograms. A save takes from milliseconds (its stall) to minutes (on a slow disk).
SAVE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
PHASES = ("stall", "stage", "queue", "write", "fsync", "commit", "durable", "verify")


class Metric(NamedTuple):
    """A Prometheus metric: what kind it is, what it says, and by which labels it is split."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "holdfast_info": Metric("gauge", "1, labelled with node and version", ("node", "version")),
    "holdfast_rounds": Metric(
        "counter", "Rounds that ended, by how; dropped are generations that the policy let go", ("state",)
    ),
    "holdfast_rounds_failed": Metric(
        "counter", "Rounds that ended without a checkpoint, by the code of the error", ("code",)
    ),
    "holdfast_checkpoints_removed": Metric("counter", "Checkpoints removed since the start, by why", ("why",)),
    "holdfast_rounds_open": Metric("gauge", "Rounds that are under way"),
    "holdfast_save_seconds": Metric(
        "histogram",
        "Seconds of each phase of the saves that this node wrote: "
        "stall, stage, queue, write, fsync (a part of write), commit, verify; durable is from begin to commit",
        ("phase",),
    ),
    "holdfast_saved_bytes": Metric("counter", "Bytes of the checkpoints that this node committed since its start"),
    "holdfast_last_commit_age_seconds": Metric("gauge", "Age of the newest checkpoint", ("run",)),
    "holdfast_last_verified_age_seconds": Metric("gauge", "Age of the newest verified checkpoint", ("run",)),
    "holdfast_run_lost": Metric("gauge", "1 where ranks of a run are gone without a goodbye", ("run",)),
    "holdfast_exposed_seconds": Metric(
        "gauge", "Training time that a crash now would lose; 0 where nobody trains", ("run",)
    ),
    "holdfast_exposed_steps": Metric("gauge", "Steps behind the newest checkpoint that ranks have begun to save", ("run",)),
    "holdfast_save_interval_seconds": Metric("gauge", "Median time between the newest saves", ("run",)),
    "holdfast_save_failures": Metric("gauge", "How many of the newest saves failed, one after the other", ("run",)),
    "holdfast_run_bytes": Metric("gauge", "Bytes of the checkpoints of a run", ("run",)),
    "holdfast_run_quota_bytes": Metric("gauge", "Bytes that a run may have, where it has a quota", ("run",)),
    "holdfast_checkpoints": Metric("gauge", "Checkpoints, by the worst that is known of them", ("state",)),
    "holdfast_scrub_lag_seconds": Metric("gauge", "How long ago the checkpoint was last read back that has waited longest"),
    "holdfast_replica_missing": Metric("gauge", "Committed checkpoints without a copy in a tier", ("tier",)),
    "holdfast_replica_damaged": Metric("gauge", "Copies in a tier that are damaged", ("tier",)),
    "holdfast_arena_bytes": Metric("gauge", "Shared memory held for staging"),
    "holdfast_arena_bytes_max": Metric("gauge", "Shared memory that may be held for staging"),
    "holdfast_run_arena_bytes": Metric("gauge", "Shared memory that a run holds for staging and restores", ("run",)),
    "holdfast_arena_slots": Metric("gauge", "Slots of the arena, by what they are in use for", ("state",)),
    "holdfast_ranks": Metric("gauge", "Ranks connected to this daemon"),
    "holdfast_restore_read_bytes": Metric(
        "counter",
        "Bytes read for restores by ranks of one machine: by the node for several, or by a rank for itself",
        ("by",),
    ),
    "holdfast_requests_refused": Metric(
        "counter", "Requests refused at the door since the start, by the code of the error", ("code",)
    ),
    "holdfast_storage_free_bytes": Metric("gauge", "Bytes that can still be written"),
    "holdfast_jobs": Metric("gauge", "Jobs that are kept, by state", ("state",)),
    "holdfast_catalog_up": Metric("gauge", "1 while the catalog answers; 0: saves go on, and what it knows is not exported"),
    "holdfast_catalog_waiting": Metric("gauge", "Notes of saves and events that wait to be told to the catalog"),
    "holdfast_events": Metric("counter", "Events that this node recorded since its start, by kind", ("kind",)),
    "holdfast_http_request_seconds": Metric(
        "histogram",
        "Seconds until a request was answered, by route, method and class of status",
        ("method", "route", "status"),
    ),
    "holdfast_http_sent_bytes": Metric("counter", "Bytes of bodies sent over HTTP"),
}


class Histogram:
    """Counts of values by upper bound, and their sum. Not thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value; one that equals a bound belongs below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        made = Histogram(self._bounds)
        made._counts, made.sum = list(self._counts), self.sum
        return made

    def buckets(self) -> Iterator[tuple[str, float]]:
        """How many values lie at or below each bound, as Prometheus has it; the last bound is +Inf."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return zip(bounds, accumulate(map(float, self._counts)), strict=True)
