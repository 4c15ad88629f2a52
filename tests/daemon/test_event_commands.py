"""The command of `--on-event`: once for each event of this node, never in the way, ended in time, and with no secret."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_service.config import plain_environment
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.daemon import event_commands
from holdfast_service.daemon.event_commands import EventCommands
from holdfast_service.daemon.tied_command import Command
from tests.daemons import wait_until
from tests.databases import sqlite_database

NOTE = """
import os, sys
text = sys.stdin.read()
with open('told', 'a') as file:
    file.write(text)
"""


database = sqlite_database


class Node:
    """A node's events, and the command for them."""

    def __init__(self, database: Database, root: Path, name: str = "node-1") -> None:
        self.events = Events(database, name, lambda: "2026-01-01T00:00:00Z")
        self.name, self.root = name, root
        self.commands: EventCommands | None = None

    def start(self, text: str, seconds_max: float = 60.0, kinds: tuple[str, ...] = (), **environment: str) -> EventCommands:
        command = Command(
            (sys.executable, "-c", text), {**plain_environment(), **environment}, seconds_max, "--on-event-timeout"
        )
        self.commands = EventCommands(command, self.events, self.name, kinds, self.root)
        return self.commands

    def told(self) -> list[dict[str, Any]]:
        path = self.root / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda event: event["id"])


@pytest.fixture
def node(database: Database, tmp_path: Path) -> Iterator[Node]:
    made = Node(database, tmp_path)
    yield made
    if made.commands is not None:
        made.commands.close()


def ended(commands: EventCommands, *outcomes: int) -> None:
    """Wait until so many were done and have failed."""
    wait_until(lambda: (commands.counts["done"], commands.counts["failed"]) == outcomes)


def test_each_event_of_this_node_once(node: Node, database: Database, tmp_path: Path) -> None:
    """As JSON on its input; those of other nodes, and of before, are not this one's."""
    node.events.add("run-died", "before", "a")
    commands = node.start(NOTE)
    other = Node(database, tmp_path, "node-2")
    for number in range(6):
        node.events.add("run-died", f"ä {number}", "a", number, level="error", why="<&>")
        other.events.add("run-died", "of another node", "a")
    ended(commands, 6, 0)
    told = node.told()
    assert [(event["text"], event["step"]) for event in told] == [(f"ä {n}", n) for n in range(6)]
    assert told[0]["detail"] == {"why": "<&>"} and told[0]["level"] == "error" and told[0]["node"] == "node-1"
    wait_until(lambda: not commands.busy())


def test_only_the_kinds_that_are_wanted(node: Node) -> None:
    commands = node.start(NOTE, kinds=("save-aborted",))
    node.events.add("run-died", "no", "a")
    node.events.add("save-aborted", "yes", "a")
    ended(commands, 1, 0)
    assert [event["text"] for event in node.told()] == ["yes"]


def test_a_failure_is_logged_counted_and_no_event(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    commands = node.start("import sys; print('why it failed'); sys.exit(3)")
    node.events.add("run-died", "it is", "a")
    ended(commands, 0, 1)
    wait_until(lambda: "ended with status 3" in caplog.text and "why it failed" in caplog.text)
    assert len(node.events.after(0, 9)) == 1


def test_it_ends_when_its_time_is_over(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    commands = node.start("import time; time.sleep(600)", 0.5)
    node.events.add("run-died", "it is", "a")
    ended(commands, 0, 1)
    wait_until(lambda: "was ended after 0.5 s (--on-event-timeout)" in caplog.text)


def test_so_many_run_at_a_time_and_the_end_ends_them(node: Node, tmp_path: Path) -> None:
    """Nobody who records an event waits; what has not run when the daemon ends does not run."""
    commands = node.start("import os, time; open(f'began-{os.getpid()}', 'w').close(); time.sleep(600)")
    for number in range(20):
        node.events.add("run-died", f"{number}", "a")
    wait_until(lambda: len(list(tmp_path.glob("began-*"))) == event_commands.AT_ONCE)
    commands.close()
    assert len(list(tmp_path.glob("began-*"))) == event_commands.AT_ONCE == commands.counts["failed"]
    commands.close()


def test_events_that_are_not_kept_any_more_are_counted(
    node: Node, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that is too slow for a flood loses the oldest, and it is said which."""
    monkeypatch.setattr(event_commands, "AT_ONCE", 1)
    monkeypatch.setattr(event_commands, "READ_MAX", 1)
    monkeypatch.setattr("holdfast_service.control.catalog.events.EVENTS_MAX", 2)
    monkeypatch.setattr("holdfast_service.control.catalog.events.TRIM_EVERY", 1)
    gate = node.root / "gate"
    node.events.add("run-died", "before", "a")
    commands = node.start("import os, time\nwhile not os.path.exists('gate'): time.sleep(0.02)")
    for number in range(8):
        node.events.add("run-died", f"{number}", "a")
    assert len(node.events.after(0, 9)) == 2
    gate.touch()
    wait_until(lambda: "is too slow: events" in caplog.text)
    assert commands.counts["dropped"] >= 1


def test_the_environment_is_plain() -> None:
    """Nothing of the daemon, and no secret that it was started with."""
    given = {"PATH": "/bin", "LC_ALL": "C", "HOLDFAST_TOKEN": "hf_x", "AWS_SECRET_ACCESS_KEY": "x", "NOTIFY_SOCKET": "x"}
    assert plain_environment(given) == {"PATH": "/bin", "LC_ALL": "C"}
