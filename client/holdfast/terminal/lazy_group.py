"""Groups of commands, each imported only when it is run or its help is shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

STATUSES = "Exit statuses: `holdfast help exit`."


class Entry(NamedTuple):
    """Where a command or group (a `Typer`) is; its line in the list; examples; and arguments of `Typer.command`."""

    module: str
    attribute: str
    line: str
    examples: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}


class LazyGroup(TyperGroup):
    """Subclasses list the commands, by the title of their group. Each line equals the beginning of the command's own help,
    which a test checks.
    """

    groups: ClassVar[Mapping[str, Mapping[str, Entry]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.entries = {name: entry for entries in self.groups.values() for name, entry in entries.items()}
        self.commands = {
            name: TyperCommand(name, help=entry.line, rich_help_panel=title)
            for title, entries in self.groups.items()
            for name, entry in entries.items()
        }
        _dressed(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.entries:
            self.commands[args[0]] = self.load(args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group; `rich_help_panel` does the same on a terminal."""
        del ctx
        width = formatter.width - 6 - max(map(len, self.entries))
        for title, entries in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in entries])

    def load(self, name: str) -> Any:
        entry = self.entries[name]
        loaded = getattr(import_module(entry.module), entry.attribute)
        app = typer.Typer(add_completion=False)
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=name, epilog=_epilog(entry.examples))
            command = typer.main.get_group(app).commands[name]
        else:
            app.command(name, epilog=_epilog(entry.examples), **entry.settings)(loaded)
            command = typer.main.get_command(app)
        for below, one in getattr(command, "commands", {}).items():
            one.epilog = _epilog([example for example in entry.examples if example.startswith(f"holdfast {name} {below}")])
        return _dressed(command)


def _epilog(examples: list[str] | tuple[str, ...]) -> str:
    kept = "" if sys.stdout.isatty() else "\b\n"  # the plain writer joins other lines
    return "\n".join([f"{kept}Examples:", *(f"  {example}" for example in examples), "", STATUSES])


def _dressed(command: Any) -> Any:
    for one in (command, *getattr(command, "commands", {}).values()):
        if not sys.stdout.isatty():
            one.rich_markup_mode = None
        elif one.help:  # rich keeps the breaks of a docstring's lines
            one.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in one.help.split("\n\n"))
    return command
