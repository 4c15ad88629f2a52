"""A group of commands, each of which is imported when it is run or asked for its options: the list of them needs none."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Entry(NamedTuple):
    """Where a command, or a group of them (a `Typer`), is; the line that lists it; and what `Typer.command` is to know."""

    module: str
    attribute: str
    line: str
    settings: Mapping[str, Any] = {}


class LazyGroup(TyperGroup):
    """Subclasses say what there is, by name. Each line is how the command's own help begins, which a test holds it to."""

    entries: ClassVar[Mapping[str, Entry]] = {}
    epilog_of_each: ClassVar[str | None] = None

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=entry.line) for name, entry in self.entries.items()}
        _dressed(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As a group does; the command that is named is imported."""
        if args and args[0] in self.entries:
            self.commands[args[0]] = self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> Any:
        """The command itself, with its options."""
        entry = self.entries[name]
        found = getattr(import_module(entry.module), entry.attribute)
        app = typer.Typer(add_completion=False)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, epilog=self.epilog_of_each)
            group = typer.main.get_group(app)
            return _dressed(group.commands[name])
        app.command(name, epilog=self.epilog_of_each, **entry.settings)(found)
        return _dressed(typer.main.get_command(app))


def _dressed(command: Any) -> Any:
    """Its help has boxes and colours on a terminal, and neither in a pipe."""
    if not sys.stdout.isatty():
        for one in (command, *getattr(command, "commands", {}).values()):
            one.rich_markup_mode = None
    return command
