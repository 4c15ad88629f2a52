"""Table of all metrics that the service exposes, and the histograms behind some of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Literal, NamedTuple

RUNS_MAX = 200  # metrics by run are of so many runs, those that have saved last

# Upper bounds of histograms. A save takes from milliseconds (its stall) to minutes (on a slow disk).
SAVE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
PHASES = ("stall", "stage", "queue", "write", "fsync", "raised", "commit", "durable", "verify")


class Metric(NamedTuple):
    """A Prometheus metric: kind, help text and labels."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_OF_REQUEST = ("kind", "tier")  # the tier is empty for the root's bucket
METRICS: dict[str, Metric] = {
    "holdfast_info": Metric("gauge", "Always 1, labelled with node and version", ("node", "version")),
    "holdfast_rounds": Metric(
        "counter", "Saves that ended, by outcome; dropped: storage was slower than the saves", ("state",)
    ),
    "holdfast_rounds_failed": Metric("counter", "Saves that ended without a checkpoint, by error code", ("code",)),
    "holdfast_checkpoints_removed": Metric("counter", "Checkpoints removed since the start, by reason", ("why",)),
    "holdfast_rounds_open": Metric("gauge", "Saves in progress"),
    "holdfast_save_seconds": Metric(
        "histogram",
        "Seconds of each phase of the saves that this node wrote: stall, stage, queue, write, fsync and "
        "raised (parts of write), commit, verify; durable is from start to commit",
        ("phase",),
    ),
    "holdfast_saved_bytes": Metric("counter", "Bytes of the checkpoints that this node committed since its start"),
    "holdfast_linked_bytes": Metric("counter", "The part of them in unchanged files, which were not written again"),
    "holdfast_last_commit_age_seconds": Metric("gauge", "Age of the newest checkpoint", ("run",)),
    "holdfast_last_verified_age_seconds": Metric("gauge", "Age of the newest verified checkpoint", ("run",)),
    "holdfast_run_died": Metric("gauge", "1 if ranks of a run were killed or ended by an exception", ("run",)),
    "holdfast_exposed_seconds": Metric(
        "gauge", "Training time that a crash now would lose; 0 if no training is active", ("run",)
    ),
    "holdfast_exposed_steps": Metric(
        "gauge", "Steps since the newest checkpoint, counted to the newest step that ranks started to save", ("run",)
    ),
    "holdfast_save_interval_seconds": Metric("gauge", "Median time between recent saves", ("run",)),
    "holdfast_save_failures": Metric("gauge", "Consecutive failed saves, up to the newest", ("run",)),
    "holdfast_run_bytes": Metric("gauge", "Bytes of the checkpoints of a run; files of several of them once", ("run",)),
    "holdfast_run_quota_bytes": Metric("gauge", "Quota of a run in bytes, if it has one", ("run",)),
    "holdfast_checkpoints": Metric("gauge", "Checkpoints, by the worst known finding", ("state",)),
    "holdfast_trash_bytes": Metric("gauge", "Bytes of deleted runs in the trash"),
    "holdfast_scrub_lag_seconds": Metric("gauge", "Age in seconds of the oldest verification"),
    "holdfast_replica_missing": Metric("gauge", "Committed checkpoints without a copy in a tier", ("tier",)),
    "holdfast_replica_missing_bytes": Metric("gauge", "Bytes that have yet to be copied to a tier", ("tier",)),
    "holdfast_replica_lag_seconds": Metric("gauge", "Age in seconds of the oldest checkpoint without a copy", ("tier",)),
    "holdfast_replica_damaged": Metric("gauge", "Copies in a tier that are damaged", ("tier",)),
    "holdfast_arena_bytes": Metric("gauge", "Shared memory reserved for staging"),
    "holdfast_arena_used_bytes": Metric("gauge", "Shared memory used for staging, of what is reserved"),
    "holdfast_arena_bytes_max": Metric("gauge", "Shared memory that may be reserved for staging"),
    "holdfast_run_arena_bytes": Metric("gauge", "Shared memory that a run has reserved for staging", ("run",)),
    "holdfast_arena_slots": Metric("gauge", "Slots of the arena, by use", ("state",)),
    "holdfast_saves_sealed": Metric("gauge", "Saves sealed by all ranks of this node and not yet ended"),
    "holdfast_nodes": Metric("gauge", "Nodes that use the catalog, by state", ("state",)),
    "holdfast_node_lost": Metric("gauge", "1 for each node that was lost and is neither back nor forgotten", ("node",)),
    "holdfast_heartbeat_age_seconds": Metric("gauge", "Seconds since this node last renewed its cluster membership"),
    "holdfast_ranks": Metric("gauge", "Ranks connected to this daemon"),
    "holdfast_requests_refused": Metric(
        "counter", "Requests refused for authentication or authorisation since the start, by error code", ("code",)
    ),
    "holdfast_audit_lost": Metric(
        "counter", "Audit log entries lost since the start, because the catalog was unavailable for too long"
    ),
    "holdfast_storage_free_bytes": Metric("gauge", "Free bytes on the storage"),
    "holdfast_objects_requests": Metric("counter", "Requests to a bucket since the start, by kind", _OF_REQUEST),
    "holdfast_objects_retries": Metric("counter", "Requests to a bucket that repeated a failed one, by kind", _OF_REQUEST),
    "holdfast_objects_sent_bytes": Metric("counter", "Bytes of bodies sent to a bucket, by kind of request", _OF_REQUEST),
    "holdfast_objects_received_bytes": Metric("counter", "Bytes of bodies received from a bucket, by kind", _OF_REQUEST),
    "holdfast_objects_failing_seconds": Metric(
        "gauge", "Seconds since a bucket answers requests of a kind with errors only, or not at all", _OF_REQUEST
    ),
    "holdfast_jobs": Metric("gauge", "Stored jobs, by state", ("state",)),
    "holdfast_catalog_up": Metric(
        "gauge", "1 while the catalog answers; at 0 saves continue, but metrics from the catalog are missing"
    ),
    "holdfast_catalog_waiting": Metric("gauge", "Records of saves and events waiting for the catalog"),
    "holdfast_events": Metric("counter", "Events recorded by this node since its start, by kind", ("kind",)),
    "holdfast_notifications": Metric(
        "counter",
        "Messages to notification targets since the start: sent, failed; and alerts that cleared unsent (dropped)",
        ("outcome",),
    ),
    "holdfast_event_commands": Metric(
        "counter",
        "Commands of --on-event since the start: done, failed; and times that it fell behind and lost events (dropped)",
        ("outcome",),
    ),
    "holdfast_watched_up": Metric("gauge", "1 if a watched daemon responds, otherwise 0", ("daemon",)),
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
        return deepcopy(self)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """How many values lie at or below each bound, as Prometheus has it; the last bound is +Inf."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return zip(bounds, accumulate(map(float, self._counts)), strict=True)
