"""`holdfast help`: the help of a command, and the exit statuses of all."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.terminal import console
from holdfast_formats.errors import InvalidRequest

EXIT = "exit"
EXIT_STATUSES = (
    (0, "done", ""),
    (
        1,
        "`doctor` found a problem, `catalog` found a difference or could not repair it, the demo failed, you "
        "answered no, or another error occurred",
        "read the message",
    ),
    (2, "the command or the request is invalid", "correct it"),
    (3, "the run, the checkpoint or another object was not found", "list what exists with `holdfast ls`"),
    (
        4,
        "conflict: for example, another client made a change first, or the checkpoint is pinned",
        "check the current state, then decide",
    ),
    (5, "the checkpoint is damaged", "do not use these bytes; restore another step"),
    (
        6,
        "unavailable: a daemon or storage does not answer, there is no space, or a time limit passed",
        "fix the cause, or try again",
    ),
    (7, "denied: no token, or a token without this permission", "use another token"),
)

Topic = Annotated[list[str] | None, typer.Argument(metavar="[COMMAND…|exit]", help="A command, or `exit`.")]


def help(context: typer.Context, topic: Topic = None) -> None:
    """Show the help of a command, or what the exit statuses mean."""
    if topic == [EXIT]:
        table = console.table("STATUS", "MEANING", "WHAT TO DO", right=("STATUS",), wrap=("MEANING", "WHAT TO DO"))
        for status, meaning, advice in EXIT_STATUSES:
            table.add_row(str(status), meaning, advice)
        console.show(table)
        return
    with console.reporting(as_json=False):
        above: Any = context.parent
        for name in topic or ():
            above = _below(above, name)
    print(above.get_help())


def _below(above: Any, name: str) -> Any:
    """The context of a command that a context's command has."""
    if name not in getattr(above.command, "commands", {}):
        raise InvalidRequest(f"there is no command {name!r}", hint="`holdfast --help` lists them; `holdfast help exit`")
    _, command, _ = above.command.resolve_command(above, [name])
    return type(above)(command, info_name=name, parent=above)
