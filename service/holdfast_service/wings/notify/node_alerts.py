"""Alerts of nodes and replicas, as the daemon's nodes report them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from holdfast_formats.rest.measurements import Alert
from holdfast_service.api.routes.nodes import listed_nodes
from holdfast_service.api.services import Services
from holdfast_service.control.access.tokens import Principal
from holdfast_service.control.insight.acknowledgements import AlertKey
from holdfast_service.control.insight.summary_board import key_of
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.wings.notify import alerts

UNLIMITED = Principal("alerts", "admin")  # sees all that there is


def still_there(services: Services, summaries: Summaries) -> Callable[[Collection[str]], set[AlertKey]]:
    """A function that returns the present alerts: of some runs, and of nodes and replicas for ""."""

    def there(runs: Collection[str]) -> set[AlertKey]:
        keys = {key_of(summary.run, item) for summary in summaries.some(sorted(runs)) for item in summary.attention}
        if "" in runs:
            keys |= {alerts.keyed(alert) for alert in alerts.of_nodes(listed_nodes(services, UNLIMITED))}
        return keys

    return there


def alerts_of_nodes(services: Services, summaries: Summaries, viewer: Principal = UNLIMITED) -> list[Alert]:
    """With their acknowledgements."""
    return alerts.marked(alerts.of_nodes(listed_nodes(services, viewer)), summaries.acknowledgements.known([""]))
