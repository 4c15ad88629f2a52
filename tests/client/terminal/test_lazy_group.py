"""The list of commands: each line is true, and neither the list nor a command imports what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from holdfast.cli import Commands, app

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


@pytest.mark.parametrize("name", Commands.entries)
def test_a_line_is_how_the_help_begins(name: str) -> None:
    command = get_command(app).load(name)  # type: ignore[attr-defined]
    assert command.name == name and command.epilog == Commands.epilog_of_each
    assert " ".join(command.help.split()).startswith(Commands.entries[name].line)


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
