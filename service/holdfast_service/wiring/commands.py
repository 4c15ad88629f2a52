"""Makes the commands that an operator has run after commits and for events."""

from __future__ import annotations

from holdfast_formats.errors import InvalidRequest
from holdfast_service.config import Config, RootPlace, command_words, plain_environment
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.control import Control
from holdfast_service.daemon.commit_commands import CommitCommands
from holdfast_service.daemon.event_commands import EventCommands
from holdfast_service.daemon.tied_command import Command


def commit_commands(config: Config, control: Control, root: RootPlace, url: str | None) -> CommitCommands | None:
    """The command of --on-commit, if there is one."""
    if config.on_commit is None:
        return None
    about = {"HOLDFAST_ROOT": root.label, "HOLDFAST_NODE": config.node, **({"HOLDFAST_URL": url} if url else {})}
    command = Command(command_words(config.on_commit), {**plain_environment(), **about}, config.on_commit_timeout)
    return CommitCommands(command, control.events, control.record_queue.recorded, root)


def event_commands(config: Config, events: Events, root: RootPlace) -> EventCommands | None:
    """The command of --on-event, if there is one."""
    if config.on_event is None:
        if config.on_event_kinds:
            raise InvalidRequest("--on-event-kinds needs --on-event", hint="pass --on-event as well, or leave both out")
        return None
    command = Command(
        command_words(config.on_event), plain_environment(), config.on_event_timeout, limited_by="--on-event-timeout"
    )
    return EventCommands(command, events, config.node, config.on_event_kinds, root.directory)
