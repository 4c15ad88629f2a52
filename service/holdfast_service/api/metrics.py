"""The metrics of one daemon, read from catalog, storage and arena at the moment of the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .services import Services

ENDED = ("committed", "aborted")


class Collected(Collector):
    """Yields each metric once; every name is listed in API.md."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        node = self._services.node()
        info = GaugeMetricFamily("holdfast_info", "1, labelled with node and version", labels=["node", "version"])
        info.add_metric([node.name, node.version], 1)
        yield info
        counts = self._services.catalog.round_counts()
        ended = CounterMetricFamily("holdfast_rounds", "Rounds that ended, by how", labels=["state"])
        for state in ENDED:
            ended.add_metric([state], counts.get(state, 0))
        yield ended
        open_rounds = sum(count for state, count in counts.items() if state not in ENDED)
        yield GaugeMetricFamily("holdfast_rounds_open", "Rounds that are under way", value=open_rounds)
        yield GaugeMetricFamily("holdfast_arena_bytes", "Shared memory held for staging", value=node.arena_bytes)
        yield GaugeMetricFamily("holdfast_ranks", "Ranks connected to this daemon", value=node.ranks)
        free = self._services.tier.free_bytes()
        yield GaugeMetricFamily("holdfast_storage_free_bytes", "Bytes that can still be written", value=free)
