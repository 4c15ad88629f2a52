"""Every command's table at 80 and at 100 columns, and in a pipe, of a real daemon whose names are long, wide and hostile."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.rest.jobs import VerifyJob
from tests.checkpoints import build
from tests.daemons import RunningDaemon, running

RUN = "pretrain-" + "7b-experiment-" * 8 + "x"  # 122 characters
EVIL = "layers.漢字漢字漢字漢字漢字漢字.e\u0301\u0301.\x1b[2J\u202e.weight." + "deep." * 14
WORDS = {
    "RUN",
    "STEP",
    "STATE",
    "JOB",
    "NAME",
    "NODE",
    "TENSOR",
    "CHECK",
    "FILE",
    "LIMIT",
    "PROGRAM",
    "GROUP",
    "RANK",
    "KIND",
}

_STYLE = re.compile(r"\x1b\[[\d;]*m")

Render = Callable[[int, list[str]], str]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    root = tmp_path_factory.mktemp("wide") / "root"
    rng = np.random.default_rng(0)
    for step in (5, 10):
        arrays = {
            "model": {EVIL: rng.standard_normal((64, 24)).astype(np.float32), "b": np.zeros(2, np.float32)},
            "optim": {f"{EVIL}/exp_avg": rng.standard_normal(7).astype(np.float32)},
        }
        build(root / naming.checkpoint_path(RUN, step), arrays, run=RUN, step=step)
    with running(root, listen="127.0.0.1:0") as served:
        with Api(served.url) as api:
            retention.label(api, RUN, 5, "release-candidate-of-the-year-2026-with-a-long-name")
            retention.label(api, RUN, 5, "second-label")
            retention.pin(api, RUN, 5)
            job = api.submit_job(VerifyJob(run=RUN, step=5))
            while job.state in ("queued", "running"):
                job = api.job(job.id, 1.0)
            body = {"name": "token-" + "n" * 50, "scope": "read", "runs": "pretrain-*", "expires_s": 86_400}
            api.request("POST", "/v1/tokens", json=body)
        yield served


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch, daemon: RunningDaemon) -> Render:
    """Run a command with a terminal of so many columns as its output; returns what it wrote there."""

    def rendered(width: int, words: list[str]) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("HOLDFAST_URL", daemon.url)
        screen = _Screen()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            app(words, standalone_mode=False)
        return _STYLE.sub("", screen.getvalue())

    return rendered


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


COMMANDS = {
    "ls": ["ls"],
    "ls RUN": ["ls", RUN],
    "ls --root": ["ls", RUN, "--root", "ROOT"],
    "show": ["show", f"{RUN}@5"],
    "stats": ["stats", f"{RUN}@5"],
    "diff": ["diff", f"{RUN}@5", "10"],
    "restore": ["restore", f"{RUN}@5", "--layout", "dp=2", "--rank", "0", "--plan"],
    "keep": ["keep", RUN],
    "keep --dry-run": ["keep", RUN, "--last", "1", "--dry-run"],
    "jobs": ["jobs", "ls"],
    "jobs show": ["jobs", "show", "1"],
    "token": ["token", "ls"],
    "nodes": ["nodes"],
    "top": ["top", "--once"],
    "doctor": ["doctor"],
    "programs": ["programs", "list"],
}
LONG = {"show", "jobs show", "diff", "restore", "stats", "top"}  # sentences around the table name the run in full


def words_of(command: str, daemon: RunningDaemon) -> list[str]:
    return [str(daemon.root) if word == "ROOT" else word for word in COMMANDS[command]]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_on_a_terminal(command: str, width: int, render: Render, daemon: RunningDaemon) -> None:
    """No line of a table is wider than the terminal, no word of a header is broken, and nothing steers the terminal."""
    shown = render(width, words_of(command, daemon))
    lines = shown.splitlines()
    header = next(number for number, line in enumerate(lines) if set(line.split()) & WORDS) if command != "jobs show" else 0
    assert "\x1b[2J" not in shown and "\u202e" not in shown and "\x07" not in shown
    if command != "jobs show":
        assert all(cell_len(line) <= width for line in lines[header : header + 2])
    if command not in LONG:
        assert all(cell_len(line) <= width for line in lines), shown
    assert "─" not in shown and "│" not in shown


def test_what_is_left_out(render: Render) -> None:
    """The order that docs/cli.md states; marks and states are never among it."""
    narrow = render(80, ["ls", RUN])
    assert "TENSORS" not in narrow.splitlines()[0] and "MARKS" in narrow.splitlines()[0]
    assert "left out: TENSORS" in narrow
    assert "release-candidate" in narrow and "second-label" in narrow and "pinned" in narrow
    assert "left out" not in render(200, ["ls", RUN])
    top = render(100, ["top", "--once"]).splitlines()[0].split()
    assert top[0] == "RUN" and {"STATE", "STEP", "EXPOSED", "ATTENTION"} <= set(top)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "jobs show"])
def test_in_a_pipe(command: str, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tabs between whole values, as many in each line of a table; no colours, no boxes; and JSON on request."""
    monkeypatch.setenv("HOLDFAST_URL", daemon.url)
    words = words_of(command, daemon)
    done = CliRunner().invoke(app, words)
    lines = done.stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if "\t" in line)
    rows = lines[head : next((at for at in range(head, len(lines)) if "\t" not in lines[at]), len(lines))]
    assert len(rows) > 1 and len({row.count("\t") for row in rows}) == 1, done.stdout
    assert "\x1b" not in done.stdout and "─" not in done.stdout and "…" not in done.stdout
    found = json.loads(CliRunner().invoke(app, [word for word in words if word != "--once"] + ["--json"]).stdout)
    assert found


def test_whole_names_in_a_pipe(daemon: RunningDaemon) -> None:
    """What a narrow terminal would shorten is whole, with controls as escapes, where a program reads it."""
    piped = CliRunner().invoke(app, ["stats", f"{RUN}@5", "--url", daemon.url]).stdout
    assert EVIL.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in piped.split("\t")


def test_a_real_terminal(daemon: RunningDaemon) -> None:
    """The installed command in a pseudo terminal of 80 columns: colours unless NO_COLOR is set, and no line wraps."""
    shown = {}
    for colour in ("", "1"):
        leader, follower = pty.openpty()
        environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "HOLDFAST_URL": daemon.url, "NO_COLOR": colour}
        command = [sys.executable, "-c", "from holdfast.cli import main; main()", "jobs", "ls"]
        subprocess.run(command, stdout=follower, env=environment, check=True)
        os.close(follower)
        shown[colour] = _read(leader)
    assert "\x1b[32mdone" in shown[""] and "\x1b[32m" not in shown["1"]
    assert all(cell_len(line) <= 80 for line in _STYLE.sub("", shown["1"]).splitlines())


def _read(leader: int) -> str:
    found = b""
    try:
        while part := os.read(leader, 65_536):
            found += part
    except OSError:  # how Linux says that nobody holds the other side
        pass
    os.close(leader)
    return found.decode()


def test_help_in_a_pipe_has_no_boxes() -> None:
    """Neither the list of commands nor a command's options, nor a mistake in them."""
    for words in (["--help"], ["ls", "--help"], ["jobs", "--help"], ["jobs", "ls", "--help"], ["ls", "--nope"]):
        shown = CliRunner().invoke(app, words)
        assert "╭" not in shown.output and "│" not in shown.output and "\x1b" not in shown.output
