"""Wires notifications, event commands, and watched daemons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.measurements import Attention
from holdfast_service.config import Config, command_words, plain_environment
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.nodes import Nodes
from holdfast_service.daemon.tied_command import Command
from holdfast_service.wings.notify.alerts import AlertSources
from holdfast_service.wings.notify.delivery_records import DeliveryRecords
from holdfast_service.wings.notify.event_commands import EventCommands
from holdfast_service.wings.notify.notifier import DUTY, Notifier, NotifierContext
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch, read_tokens

if TYPE_CHECKING:
    from holdfast_service.api.services import Services


def event_commands(config: Config, events: Events, root: Path) -> EventCommands | None:
    """The command of --on-event, if there is one."""
    if config.on_event is None:
        if config.on_event_kinds:
            raise InvalidRequest("--on-event-kinds needs --on-event", hint="give the command as well, or leave both out")
        return None
    command = Command(
        command_words(config.on_event), plain_environment(), config.on_event_timeout, limited_by="--on-event-timeout"
    )
    return EventCommands(command, events, config.node, config.on_event_kinds, root)


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


def notifier(config: Config, services: Services, nodes: Nodes, stack: ExitStack) -> Notifier | None:
    """The notifier of --notify, until the `stack` unwinds; of several nodes, the one on duty sends."""
    if config.notify is None:
        return None

    from holdfast_service.api.routes.alerts import of_service
    from holdfast_service.api.routes.summaries import of

    def watched() -> Iterator[tuple[str, Attention]]:
        if services.watched is not None:
            yield from services.watched.alerts()

    summaries = of(services)
    telling = NotifierContext(
        DeliveryRecords(services.catalog.database, config.node),
        AlertSources(summaries, lambda: of_service(services, summaries), watched).now,
        services.events,
        partial(nodes.has, DUTY),
        config.node,
    )
    made = Notifier(config.notify, telling)
    stack.callback(made.close)
    return made
