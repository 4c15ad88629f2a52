"""The command of `--on-commit`: run once for each commit, never in the way, ended in time, heard of if it fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Api, Checkpointer
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.operations import Event
from holdfast_service.config import RootPlace, command_words, parse, plain_environment
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.daemon import commit_commands as module
from holdfast_service.daemon import tied_command
from holdfast_service.daemon.commit_commands import CommitCommands
from holdfast_service.daemon.tied_command import Command
from tests.daemons import running, wait_until
from tests.databases import sqlite_database


def made(step: int, attempt: int = 1) -> Manifest:
    return Manifest(
        format=1,
        run="r",
        step=step,
        attempt=attempt,
        created="now",
        world=1,
        mesh={},
        metrics={},
        files=(),
        tensors={},
        aliases={},
    )


class Steps:
    """The events of a node."""

    def __init__(self, database: Database) -> None:
        self.events = Events(database, "node-1", lambda: "2026-01-01T00:00:00Z")

    def failed(self) -> list[str]:
        return [event.text for event in self.events.after(0, 99, kind="commit-command-failed")]


database = sqlite_database


@pytest.fixture
def steps(database: Database) -> Steps:
    return Steps(database)


def python(text: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text, *arguments)


class Running:
    """Commands for the length of a test."""

    def __init__(
        self, steps: Steps, root: Path, words: tuple[str, ...], seconds_max: float = 60.0, **environment: str
    ) -> None:
        self.commands = CommitCommands(
            Command(words, {**os.environ, **environment}, seconds_max),
            steps.events,
            lambda wait_s: True,
            RootPlace(str(root), root),
        )

    def all_done(self) -> None:
        wait_until(lambda: not self.commands.busy())


@pytest.fixture
def start(steps: Steps, tmp_path: Path) -> Iterator[Any]:
    begun: list[Running] = []

    def begin(words: tuple[str, ...], *more: Any, **environment: str) -> Running:
        begun.append(Running(steps, tmp_path, words, *more, **environment))
        return begun[-1]

    yield begin
    for one in begun:
        one.commands.close()


NOTE = """
import os
line = ' '.join(os.environ[f'HOLDFAST_{name}'] for name in 'RUN STEP ATTEMPT PATH'.split())
open('told', 'a').write(line + '\\n')
"""


def test_once_for_each_commit_in_order(start: Any, steps: Steps, tmp_path: Path) -> None:
    """It is told which by its environment. One commit told twice, as by two nodes, is run once; a replaced step again."""
    ran = start(python(NOTE))
    for one in (made(1), made(2), made(2), made(2, attempt=2)):
        ran.commands.committed(one)
    ran.all_done()
    path = tmp_path / "r/checkpoints/step-0000000"
    assert (tmp_path / "told").read_text().splitlines() == [f"r 1 1 {path}1", f"r 2 1 {path}2", f"r 2 2 {path}2"]
    assert len(steps.events.after(0, 99, kind="commit-command-started")) == 3 and not steps.failed()


def test_two_nodes_that_finish_one_commit(steps: Steps, database: Database, tmp_path: Path) -> None:
    """Whoever is first runs it."""
    both = [Running(one, tmp_path, python(NOTE)) for one in (steps, Steps(database))]
    for step in range(4):
        for one in both:
            one.commands.committed(made(step))
    for one in both:
        one.all_done()
        one.commands.close()
    assert sorted(line.split()[1] for line in (tmp_path / "told").read_text().splitlines()) == ["0", "1", "2", "3"]


def test_no_shell_reads_it(start: Any, tmp_path: Path) -> None:
    """What a shell would act upon is text."""
    words = command_words(
        f"{sys.executable} -c 'import sys; open(sys.argv[1], \"w\").write(sys.argv[2])' out '$(id); `id` && x > y'"
    )
    ran = start(words)
    ran.commands.committed(made(1))
    ran.all_done()
    assert (tmp_path / "out").read_text() == "$(id); `id` && x > y"


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import sys; print('why it failed'); sys.exit(3)", "ended with status 3"),
        (
            "import os, signal; print('why it failed', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "was ended by SIGSEGV",
        ),
    ],
)
def test_a_failure_is_an_event(start: Any, steps: Steps, text: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the end of what it printed, and only the log; the next commit's command runs all the same."""
    ran = start(python(text))
    ran.commands.committed(made(1))
    ran.commands.committed(made(2))
    ran.all_done()
    assert steps.failed() == [f"the command of --on-commit for step {n} {how}" for n in (1, 2)]
    found = steps.events.after(0, 99, kind="commit-command-failed")[0]
    assert (found.level, found.step, found.detail) == ("warning", 1, {"attempt": 1, "why": how})
    assert caplog.text.count("why it failed") == 2


def test_what_prints_without_end_is_read_and_cut(start: Any, steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    """A full pipe stops nobody; the log has the end of it."""
    ran = start(python("import sys\nfor n in range(30000): print('line', n)\nsys.exit(1)"))
    ran.commands.committed(made(1))
    ran.all_done()
    printed = next(record.getMessage() for record in caplog.records if "last output" in record.getMessage())
    assert printed.endswith("line 29999\\n'") and len(printed) < 2 * tied_command.TAIL_BYTES and steps.failed()


def test_it_ends_when_its_time_is_over(start: Any, steps: Steps, tmp_path: Path) -> None:
    """With all that it has started, also if it does not heed the request to end."""
    text = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\nos.rename('pids.tmp', 'pids')\ntime.sleep(600)"
    )
    ran = start(python(text), 1.0)
    ran.commands.committed(made(1))
    ran.all_done()
    assert "was ended after 1 s (--on-commit-timeout)" in steps.failed()[0]
    if (tmp_path / "pids").exists():  # a machine that is too slow to start it ends it before
        wait_until(lambda: not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("seconds_max", [30 * 86_400.0, float("inf")])
def test_no_time_is_too_long(start: Any, steps: Steps, tmp_path: Path, seconds_max: float) -> None:
    """A month, which is more than the system waits for at a time: the command was killed at once."""
    ran = start(python(f"import time; time.sleep(0.3)\n{NOTE}"), seconds_max)
    ran.commands.committed(made(1))
    ran.all_done()
    assert not steps.failed() and (tmp_path / "told").exists()


def test_what_prints_for_ever_outside_the_group_holds_up_nobody() -> None:
    """Who has left the command's group is not ended with it, so the end of what it prints is not waited for."""
    with Path("/dev/zero").open("rb", buffering=0) as endless:
        output = tied_command._Output(endless)
        output.drain()
        assert len(output.tail) == tied_command.TAIL_BYTES


def test_what_it_leaves_running_ends_with_it(start: Any, steps: Steps, tmp_path: Path) -> None:
    """Nothing that a command has started outlives it, so nothing adds up."""
    text = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(child.pid))"
    )
    ran = start(python(text))
    ran.commands.committed(made(1))
    ran.all_done()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert not steps.failed()


def test_nobody_waits_for_it_and_not_too_many_wait(start: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one hangs, commits go on; of more than there is room for, the oldest go without, and are told."""
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    ran = start(python("import time; time.sleep(600)"))
    ran.commands.committed(made(0))
    wait_until(lambda: bool(steps.events.after(0, 9, kind="commit-command-started")))
    for step in range(1, 6):
        ran.commands.committed(made(step))
    assert [text.partition(" for ")[2] for text in steps.failed()] == [
        f"step {n} was not run: 3 newer commits are already waiting" for n in (1, 2)
    ]
    ran.commands.close()
    left = [text.partition(" for ")[2] for text in steps.failed()[2:]]
    assert left[0] == "step 0 was ended, because the daemon ended"
    assert left[1:] == [f"step {n} was not run: the daemon stopped first" for n in (3, 4, 5)]
    ran.commands.committed(made(9))
    assert steps.failed()[-1].endswith("step 9 was not run: the daemon is stopping")


def test_words_and_environment() -> None:
    """The program is found when the daemon starts, and what is the daemon's own is not handed on."""
    assert command_words("env 'a b' c")[1:] == ("a b", "c") and command_words("env")[0].startswith("/")
    for wrong in ("", "  ", "no-such-program-anywhere x", "env 'open"):
        with pytest.raises(InvalidRequest, match="--on-commit"):
            parse(["--on-commit", wrong], {})
    with pytest.raises(InvalidRequest, match="--on-commit-timeout"):
        parse(["--on-commit-timeout", "0"], {})
    assert parse([], {"HOLDFAST_ON_COMMIT": "env x"}).on_commit == "env x"
    mine = {
        "HOLDFAST_CATALOG": "postgresql://u:secret@h/d",
        "NOTIFY_SOCKET": "/x",
        "LISTEN_FDS": "1",
        "AWS_SECRET_ACCESS_KEY": "s",
        "PGPASSWORD": "p",
        "OTEL_EXPORTER_OTLP_HEADERS": "key=s",
        "PATH": "/bin",
        "LC_ALL": "C",
    }
    assert plain_environment(mine) == {"PATH": "/bin", "LC_ALL": "C"}


def test_with_a_daemon(tmp_path: Path) -> None:
    """After each commit of a training, and after none of an earlier daemon; with the daemon's kill it ends."""
    script = tmp_path / "note.py"
    script.write_text(f"{NOTE}\nimport time\ntime.sleep(0 if os.environ['HOLDFAST_STEP'] < '3' else 600)\n")
    words = f"{sys.executable} {script}"
    told = tmp_path / "root" / "told"

    def steps_told() -> list[str]:
        return [line.split()[1] for line in told.read_text().splitlines()] if told.exists() else []

    state = {"model": torch.nn.Linear(3, 3)}
    with running(tmp_path / "root", "--on-commit", words, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        with Checkpointer("llama", state, at=daemon.socket) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2, wait="durable")
        wait_until(lambda: steps_told() == ["1", "2"])
        started = api.pages("/v1/events", Event, {"kind": "commit-command-started"})
        assert {event.step for event in started} == {1, 2}
    with running(tmp_path / "root", "--on-commit", words) as daemon:
        with Checkpointer("llama", state, at=daemon.socket) as checkpointer:
            checkpointer.restore()
            checkpointer.save(3, wait="durable")
            checkpointer.save(4, wait="durable")  # while the command for step 3 hangs
        wait_until(lambda: steps_told() == ["1", "2", "3"])
        hanging = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_child(p, daemon.process.pid)]
        assert hanging
        daemon.kill()
        wait_until(lambda: not any(map(alive, hanging)))


def _is_child(process: Path, of: int) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return f"PPid:\t{of}\n" in (process / "status").read_text() and b"holdfast_service" not in b" ".join(words)
    except OSError:
        return False
