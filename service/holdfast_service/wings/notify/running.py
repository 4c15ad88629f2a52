"""What this wing runs in a daemon: the notifier, watched daemons, and the end of acknowledgements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

from fastapi import Depends, Request

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.measurements import Attention
from holdfast_service.config import Config
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.wings.notify import node_alerts
from holdfast_service.wings.notify.acknowledgement_watch import AcknowledgementWatch
from holdfast_service.wings.notify.alerts import AlertSources
from holdfast_service.wings.notify.delivery_records import DeliveryRecords
from holdfast_service.wings.notify.notifier import DUTY, Notifier, NotifierContext
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch, read_tokens

if TYPE_CHECKING:
    from holdfast_service.api.metrics import Samples
    from holdfast_service.api.services import Services


class Notifying(NamedTuple):
    """Each part is None unless it is configured."""

    notifier: Notifier | None = None  # sends alerts
    watched: DaemonWatch | None = None  # other daemons

    def samples(self) -> Samples:
        notified = {} if self.notifier is None else self.notifier.counts
        daemons = [] if self.watched is None else self.watched.daemons()
        return {
            "holdfast_notifications": [((outcome,), count) for outcome, count in notified.items()],
            "holdfast_watched_up": [((one.name,), float(one.reachable)) for one in daemons],
        }


def _parts(request: Request) -> Notifying:
    parts = request.app.state.wings["notify"]
    assert isinstance(parts, Notifying)
    return parts


Parts = Annotated[Notifying, Depends(_parts)]  # of the daemon that a route answers for


def start(config: Config, services: Services, stack: ExitStack) -> Notifying:
    """Notify and watch as configured, until the `stack` unwinds."""
    watch, summaries = watched(config, stack), services.summaries
    still = node_alerts.still_there(services, summaries)
    stack.callback(AcknowledgementWatch(summaries.acknowledgements, still).close)
    return Notifying(_notifier(config, services, summaries, watch, stack), watch)


def watched(config: Config, stack: ExitStack) -> DaemonWatch | None:
    """The daemons of --watch, queried until the `stack` unwinds."""
    if not config.watch:
        if config.watch_tokens is not None or config.watch_ca is not None:
            raise InvalidRequest("--watch-tokens and --watch-ca need --watch", hint="give --watch URL as well")
        return None
    tokens = {} if config.watch_tokens is None else read_tokens(config.watch_tokens)
    made = DaemonWatch(config.watch, tokens, config.watch_ca)
    stack.callback(made.close)
    return made


def _notifier(
    config: Config, services: Services, summaries: Summaries, watch: DaemonWatch | None, stack: ExitStack
) -> Notifier | None:
    """The notifier of --notify; of several nodes, the one on duty sends."""
    if config.notify is None:
        return None

    def of_watched() -> Iterator[tuple[str, Attention]]:
        if watch is not None:
            yield from watch.alerts()

    context = NotifierContext(
        DeliveryRecords(services.control.catalog.database, config.node),
        AlertSources(summaries, lambda: node_alerts.alerts_of_nodes(services, summaries), of_watched).now,
        services.control.events,
        partial(services.control.nodes.has, DUTY),
        config.node,
    )
    notifier = Notifier(config.notify, context)
    stack.callback(notifier.close)
    return notifier
