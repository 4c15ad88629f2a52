"""Everything that needs attention now: of all runs as their summaries say it, of nodes, and of daemons that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast_formats.rest.observed import Attention
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.telling.due import NO_RUN, NoticeKey, current

PAGE_RUNS = 200
NAMED_MAX = 20

Alerting = Callable[[], Iterable[tuple[str, Attention]]]


class AlertSources:
    """Asks all sources. The words of runs are those of the API's summaries, those of nodes of the rules for Prometheus."""

    def __init__(self, summaries: Summaries, *others: Alerting) -> None:
        self._summaries, self._others = summaries, others

    def now(self) -> dict[NoticeKey, Attention]:
        """All alerts; `CatalogUnavailable`, because what is not known is not over."""
        return current([*self._of_runs(), *(one for source in self._others for one in source())])

    def _of_runs(self) -> Iterator[tuple[str, Attention]]:
        cursor = None
        while True:
            page = self._summaries.page(cursor, PAGE_RUNS)
            for summary in page.items:
                yield from ((summary.run, item) for item in summary.attention)
            cursor = page.next
            if cursor is None:
                return


def nodes_lost(names: Sequence[str]) -> Iterator[tuple[str, Attention]]:
    """An alert for nodes that were lost."""
    if not names:
        return
    listed = ", ".join(names[:NAMED_MAX]) + (f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else "")
    one = len(names) == 1
    yield (
        NO_RUN,
        Attention(
            level="warning",
            code="node-lost",
            text=f"the {'node' if one else 'nodes'} {listed} {'is' if one else 'are'} lost: "
            + ("its daemon has ended without a goodbye, or its machine has" if one else "no daemon there has said goodbye"),
            hint="Other nodes have its duties, and its runs can be started elsewhere. Start its daemon again, or if it is "
            f"gone for good: `holdfast nodes --forget {names[0]}`.",
        ),
    )
