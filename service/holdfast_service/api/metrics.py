"""The metrics of one daemon, read from catalog, storage and arena at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast_formats.errors import NoSpace, QuotaExceeded
from holdfast_service.control.catalog import ENDED
from holdfast_service.control.rotation import WHY_REMOVED
from holdfast_service.telemetry import METRICS

from .services import Services

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}

Sample = tuple[tuple[str, ...], float]  # label values, value


class Collected(Collector):
    """Yields every metric of the table in `telemetry` once."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        samples = self._samples()
        for name, declared in METRICS.items():
            family = _FAMILIES[declared.kind](name, declared.help, labels=declared.labels)
            for labels, value in samples[name]:
                family.add_metric(labels, value)
            yield family

    def _samples(self) -> dict[str, list[Sample]]:
        node = self._services.node()
        counts = self._services.catalog.round_counts()
        open_rounds = sum(count for state, count in counts.items() if state not in ENDED)
        return {
            "holdfast_info": [((node.name, node.version), 1)],
            "holdfast_rounds": [((state,), counts.get(state, 0)) for state in ENDED],
            "holdfast_rounds_failed": [((code,), count) for code, count in self._failures().items()],
            "holdfast_checkpoints_removed": [((why,), self._services.rotation.removed[why]) for why in WHY_REMOVED],
            "holdfast_rounds_open": [((), open_rounds)],
            "holdfast_arena_bytes": [((), node.arena_bytes)],
            "holdfast_ranks": [((), node.ranks)],
            "holdfast_restore_read_bytes": [((by,), size) for by, size in self._services.restore_bytes().items()],
            "holdfast_storage_free_bytes": [((), self._services.tier.free_bytes())],
        }

    def _failures(self) -> dict[str, int]:
        """Refusals for want of room are always there, so that an alert on them can be set up before the first one."""
        return {NoSpace.code: 0, QuotaExceeded.code: 0} | self._services.catalog.failure_counts()
