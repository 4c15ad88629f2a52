"""Collects the metrics of one daemon from catalog, storage and arena at the scrape."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import CatalogUnavailable, Forbidden, NoSpace, QuotaExceeded, Unauthenticated
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import EVENTS
from holdfast_service.api.request_metrics import Requests
from holdfast_service.control.catalog.listing import ENDED
from holdfast_service.control.database.visible import sees_all, visible
from holdfast_service.control.insight.gauges import Gauges
from holdfast_service.control.retention.rotation import WHY_REMOVED
from holdfast_service.observe.metrics import METRICS, PHASES, RUNS_MAX, Histogram
from holdfast_service.wing import RunningWing

from .services import Services

log = logging.getLogger(__name__)

TOLD_S = 3.0  # how long a scrape waits for the catalog

Sample = tuple[tuple[str, ...], float | Histogram]  # label values, value
Samples = dict[str, list[Sample]]
_OF_REQUESTS = {"requests": "sent", "retries": "retries", "sent_bytes": "sent_bytes", "received_bytes": "received_bytes"}


class Collected(Collector):
    """Yields every metric of `observe.metrics` once; if the caller sees only some runs, only per-run ones.

    Totals over all runs would reveal the others.
    """

    def __init__(self, services: Services, wings: Collection[RunningWing], requests: Requests) -> None:
        self._services, self._wings, self._requests = services, wings, requests
        self._gauges = Gauges(services.control.catalog, services.summaries, services.lags)

    def collect(self) -> Iterator[Metric]:
        whole = sees_all()
        samples = self._samples() if whole else self._of_own_runs()
        for name, declared in METRICS.items():
            if name not in samples:
                continue
            if declared.kind == "histogram":
                yield _histogram(name, samples[name])
                continue
            family_kind = GaugeMetricFamily if declared.kind == "gauge" else CounterMetricFamily
            family = family_kind(name, declared.help, labels=declared.labels)
            for labels, value in samples[name]:
                assert not isinstance(value, Histogram)
                family.add_metric(labels, value)
            yield family

    def _of_own_runs(self) -> Samples:
        try:
            known: Samples = {name: list(samples) for name, samples in self._gauges.by_run().items()}
        except CatalogUnavailable as away:
            log.info("metrics of runs are not available: %s", away.detail)
            known = {}
        return {**known, **self._held()}

    def _held(self) -> Samples:
        held = [((run,), size) for run, size in self._services.arena.holders.items() if visible(run)]
        return {"holdfast_run_arena_bytes": list(held[:RUNS_MAX])}

    def _samples(self) -> Samples:
        node, record_queue, beaten_s = (
            self._services.node(),
            self._services.control.record_queue,
            self._services.control.nodes.beaten_s(),
        )
        free = self._services.control.store.free_bytes()
        try:
            gauges = record_queue.query(self._told, TOLD_S)
        except CatalogUnavailable as away:
            log.info("metrics from the catalog are not available: %s", away.detail)
            gauges = {}
        return {
            **gauges,
            "holdfast_heartbeat_age_seconds": [] if beaten_s is None else [((), beaten_s)],
            "holdfast_catalog_up": [((), 1 if gauges else 0)],
            "holdfast_catalog_waiting": [((), record_queue.pending)],
            "holdfast_info": [((node.name, node.version), 1)],
            "holdfast_checkpoints_removed": [((why,), self._services.control.rotation.removed[why]) for why in WHY_REMOVED],
            "holdfast_arena_bytes": [((), node.arena_bytes)],
            "holdfast_ranks": [((), node.ranks)],
            "holdfast_saves_sealed": [((), node.sealed)],
            "holdfast_requests_refused": [((code,), count) for code, count in self._refused().items()],
            "holdfast_trash_bytes": self._trash(),
            "holdfast_audit_lost": [((), self._services.audit.lost)],
            "holdfast_storage_free_bytes": [] if free is None else [((), free)],
            "holdfast_events": [((kind,), self._services.control.events.counts[kind]) for kind in EVENTS],
            **_of_buckets({"": self._services.control.storage.traffic, **self._services.bucket_traffic}),
            **self._arena(),
            **self._held(),
            **self._http(),
            "holdfast_event_commands": [((outcome,), count) for outcome, count in self._commands().items()],
            **{name: samples for wing in self._wings for name, samples in wing.samples().items()},
        }

    def _trash(self) -> list[Sample]:
        """None of a bucket: each scrape would list it, and wait for it while it is away."""
        control = self._services.control
        return [] if control.storage.tier is None else [((), control.trash.seen().bytes)]

    def _told(self) -> Samples:
        """Metrics from the catalog."""
        counts = self._services.control.catalog.rounds.counts()
        open_rounds = sum(count for state, count in counts.items() if state not in ENDED)
        return {
            "holdfast_rounds": [((state,), counts.get(state, 0)) for state in ENDED],
            "holdfast_rounds_open": [((), open_rounds)],
            "holdfast_rounds_failed": [((code,), count) for code, count in self._failures().items()],
            **self._saves(),
            **self._nodes(),
            **{name: list(samples) for name, samples in self._gauges.now().items()},
        }

    def _nodes(self) -> Samples:
        """The nodes of the cluster; a daemon without one is the only node."""
        census = self._services.control.nodes.census()
        return {
            "holdfast_nodes": [((state,), census.states.get(state, 0)) for state in get_args(bodies.NodeState)],
            "holdfast_node_lost": [((name,), 1) for name in census.lost],
        }

    def _refused(self) -> dict[str, int]:
        return {Unauthenticated.code: 0, Forbidden.code: 0} | dict(self._services.refusals.counts)

    def _failures(self) -> dict[str, int]:
        """Failures for lack of resources, including zeros, so that alerts can be set up before the first one."""
        return {NoSpace.code: 0, QuotaExceeded.code: 0} | self._services.control.catalog.rounds.failure_counts()

    def _saves(self) -> Samples:
        phases, size = self._services.history.counted()
        return {
            "holdfast_save_seconds": [((phase,), phases[phase]) for phase in PHASES],
            "holdfast_saved_bytes": [((), size.saved)],
            "holdfast_linked_bytes": [((), size.linked)],
        }

    def _commands(self) -> dict[str, int]:
        commands = self._services.event_commands
        return {} if commands is None else commands.counts

    def _arena(self) -> Samples:
        arena = self._services.arena
        return {
            "holdfast_arena_bytes_max": [((), arena.bytes_max)],
            "holdfast_arena_used_bytes": [((), arena.touched_bytes)],
            "holdfast_arena_slots": [((state,), count) for state, count in arena.slots.items()],
        }

    def _http(self) -> Samples:
        histograms, sent = self._requests.all()
        return {
            "holdfast_http_request_seconds": [(labels, histograms[labels]) for labels in sorted(histograms)],
            "holdfast_http_sent_bytes": [((), sent)],
        }


def _of_buckets(traffic: Mapping[str, Traffic | None]) -> Samples:
    """Requests to the bucket of each tier, "" for the root's, and the kinds of them that fail; families without samples
    where all are directories.
    """
    now = time.time()
    samples: Samples = {f"holdfast_objects_{name}": [] for name in (*_OF_REQUESTS, "failing_seconds")}
    for tier, one in traffic.items():
        if one is None:
            continue
        counts = one.by_kind()
        for name, field in _OF_REQUESTS.items():
            samples[f"holdfast_objects_{name}"] += [((kind, tier), getattr(count, field)) for kind, count in counts.items()]
        samples["holdfast_objects_failing_seconds"] += [((bad.kind, tier), now - bad.since_s) for bad in one.failing()]
    return samples


def _histogram(name: str, samples: Iterable[Sample]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, METRICS[name].help, labels=METRICS[name].labels)
    for labels, value in samples:
        assert isinstance(value, Histogram)
        family.add_metric(labels, list(value.buckets()), value.sum)
    return family
