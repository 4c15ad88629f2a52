"""The list of commands: each line is true, and neither the list nor a command imports what it does not need."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from holdfast.cli import Commands, app
from holdfast.commands.help import EXIT_STATUSES
from holdfast_formats.errors import EXIT_STATUS
from tests.kit.commands import call

HEAVY = ("httpx", "numpy", "pydantic", "safetensors", "sqlalchemy", "torch")
_SAID = """
import json, sys
from typer.testing import CliRunner
from holdfast.cli import app
done = CliRunner().invoke(app, sys.argv[1:])
print(json.dumps([done.exit_code, sorted(name for name in sys.modules if "." not in name)]))
"""


def imported(*arguments: str) -> tuple[int, set[str]]:
    """The exit status of a command, and what it has imported."""
    done = subprocess.run([sys.executable, "-c", _SAID, *arguments], capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    return status, set(modules)


ENTRIES = {name: entry for group in Commands.groups.values() for name, entry in group.items()}
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize("name", ENTRIES)
def test_a_line_is_how_the_help_begins(name: str) -> None:
    """And examples of it, and of each command below it, end the help."""
    command = get_command(app).load(name)  # type: ignore[attr-defined]
    assert command.name == name
    assert " ".join(command.help.split()).startswith(ENTRIES[name].line)
    for one in (command, *getattr(command, "commands", {}).values()):
        assert "\n  holdfast " in one.epilog and one.epilog.endswith("`holdfast help exit`.")


@pytest.mark.parametrize("example", [example for entry in ENTRIES.values() for example in entry.examples])
def test_an_example_is_a_command(example: str) -> None:
    """Its words are parsed as the command's own; nothing is run."""
    _, *words = shlex.split(example.partition(" && ")[0])
    command: Any = get_command(app)
    context = command.make_context("holdfast", [words[0]])
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)
    assert not context.args or name == "serve"


def test_commands_are_listed_in_the_groups_of_the_page() -> None:
    """In docs/cli.md and in `--help`, by the same titles and in one order."""
    page = PAGE.read_text().partition("## Name a checkpoint")[0].partition("## Commands")[2]
    listed = {}
    for section in page.split("\n### ")[1:]:
        title, _, rows = section.partition("\n")
        listed[title] = re.findall(r"^\| `holdfast (\w+)", rows, re.MULTILINE)
    assert listed == {title: list(entries) for title, entries in Commands.groups.items()}
    said = call("--help").output
    assert [line[:-1] for line in said.splitlines() if line[:1].isalpha() and line.endswith(":")] == ["Options", *listed]


def test_the_exit_statuses_are_explained_once() -> None:
    """In `holdfast help exit` and in docs/cli.md, for each branch of the errors."""
    rows = re.findall(r"^\| (\d) \| (.*?) \| (.*?) ?\|$", PAGE.read_text(), re.MULTILINE)
    assert [(str(status), meaning, advice) for status, meaning, advice in EXIT_STATUSES] == rows
    assert {status for status, _, _ in EXIT_STATUSES} == {0, 1, *EXIT_STATUS.values()}
    said = call("help", "exit").output
    assert all(meaning in said for _, meaning, _ in EXIT_STATUSES)


def test_help_shows_the_help_of_a_command() -> None:
    """At any depth; a name that is no command is refused."""
    assert call("help").output == call("--help").output
    assert call("help", "ls").output == call("ls", "--help").output
    assert "Usage: holdfast token create" in call("help", "token", "create").output
    refused = call("help", "exprot")
    assert refused.exit_code == 2 and "no command 'exprot'" in refused.output


def test_the_list_imports_no_command() -> None:
    status, modules = imported("--help")
    assert status == 0 and not modules.intersection(HEAVY)


def test_a_question_to_a_service_needs_no_arrays() -> None:
    """Nobody listens there, so it ends with the status of that; what it needs for asking is imported by then."""
    status, modules = imported("ls", "--url", "http://127.0.0.1:9")
    assert status == 6 and "httpx" in modules and not modules.intersection({"numpy", "torch", "sqlalchemy"})


def test_a_name_that_is_no_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main()", "exprot"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "export" in done.stderr


def test_every_command_is_described_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the list ends in "...", which hid what half of the commands do."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("--help").stdout.splitlines()
    assert "Operate:" in lines and [line for line in lines if line.endswith("...")] == [lines[0]], lines
