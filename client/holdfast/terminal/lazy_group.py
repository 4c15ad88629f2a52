"""A group of commands, each imported only when it is run or its help is shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(NamedTuple):
    """Where a command or group (a `Typer`) is; its line in the list; and arguments of `Typer.command`."""

    module: str
    attribute: str
    line: str
    settings: Mapping[str, Any] = {}


class LazyGroup(TyperGroup):
    """Subclasses list the commands. Each line equals the beginning of the command's own help, which a test checks."""

    entries: ClassVar[Mapping[str, LazyCommand]] = {}
    epilog_of_each: ClassVar[str | None] = None

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=entry.line) for name, entry in self.entries.items()}
        _dressed(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.entries:
            self.commands[args[0]] = self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> Any:
        entry = self.entries[name]
        loaded = getattr(import_module(entry.module), entry.attribute)
        app = typer.Typer(add_completion=False)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, epilog=self.epilog_of_each)
            group = typer.main.get_group(app)
            return _dressed(group.commands[name])
        app.command(name, epilog=self.epilog_of_each, **entry.settings)(loaded)
        return _dressed(typer.main.get_command(app))


def _dressed(command: Any) -> Any:
    if not sys.stdout.isatty():
        for one in (command, *getattr(command, "commands", {}).values()):
            one.rich_markup_mode = None
    return command
