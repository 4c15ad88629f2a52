"""All present alerts: those of `GET /v1/alerts`, of all runs, and those of other sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from holdfast_formats.rest.measurements import Alert, Attention
from holdfast_service.control.insight.alerts import of_runs, without_what_follows
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.wings.notify.schedule import NO_RUN, NoticeKey, current

PAGE_RUNS = 200

Alerting = Callable[[], Iterable[tuple[str, Attention]]]


class AlertSources:
    """Combines the summaries of runs, the service for nodes and replicas, and other sources."""

    def __init__(self, summaries: Summaries, of_service: Callable[[], Iterable[Alert]], *others: Alerting) -> None:
        self._summaries, self._of_service, self._others = summaries, of_service, others

    def now(self) -> dict[NoticeKey, Attention]:
        """All alerts; `CatalogUnavailable`, because an unknown alert is not over."""
        listed = without_what_follows([*self._of_runs(), *self._of_service()])
        alerts: list[tuple[str, Attention]] = [(one.run or NO_RUN, one) for one in listed]
        return current([*alerts, *(one for source in self._others for one in source())])

    def _of_runs(self) -> Iterator[Alert]:
        cursor = None
        while True:
            page = self._summaries.page(cursor, PAGE_RUNS)
            yield from of_runs(page.items)
            cursor = page.next
            if cursor is None:
                return
