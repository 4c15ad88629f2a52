"""A signal handler may save at any moment, and a script that exits without close() loses nothing."""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.threads import at_exit
from holdfast_formats import naming
from holdfast_formats.errors import GenerationDropped, InvalidRequest, TornSnapshot
from tests.daemons import RunningDaemon, hide, running, wait_until
from tests.forked import Forked
from tests.proxies import proxied

LIMIT_S = 240
EVERY = 601  # lines of the client between two moments at which the handler runs


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory):
    """One daemon for all tests of this file; each uses a run of its own."""
    with running(tmp_path_factory.mktemp("moments") / "root") as daemon:
        yield daemon


class Said(NamedTuple):
    """How a process ended, and all that it said."""

    status: int
    text: str


def said(*command: str) -> Said:
    """What a Python process of ours says; it may not hang."""
    with tempfile.TemporaryFile() as output:
        process = Forked(command, output=output.fileno())
        try:
            status = process.wait(LIMIT_S)
        finally:
            process.kill()
        output.seek(0)
        return Said(status, output.read().decode())


def test_a_signal_handler_may_save_whatever_its_thread_was_doing(daemon: RunningDaemon) -> None:
    """At lines all over save, fence, prepare and restore, with every `wait=`: saved, or refused by name; never a hang."""
    done = said("-m", "tests.regressions.preempted", str(daemon.socket), str(random.randrange(1, EVERY)), str(EVERY))
    assert done.status == 0, done.text
    assert "moments" in done.text and "internal-error" not in done.text, done.text


class Interrupted(torch.optim.SGD):
    """Its step runs `handler`, as a signal in the middle of it would, and may fail then."""

    handler = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        first, *others = [p for group in self.param_groups for p in group["params"]]
        first.add_(1)
        self.handler()
        for other in others:
            other.add_(1)


def interrupted(daemon: RunningDaemon, run: str) -> tuple[Checkpointer, nn.Module, Interrupted]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.utils.vector_to_parameters(torch.zeros(12), model.parameters())
    optimizer = Interrupted(model.parameters(), lr=0.1)
    return Checkpointer(run, {"model": model, "optim": optimizer}, at=daemon.socket), model, optimizer


def test_no_save_is_taken_in_the_middle_of_a_step(daemon: RunningDaemon) -> None:
    """Asked for there, it is made right after the step: no checkpoint has half of it. A handler that would wait is told."""
    checkpointer, model, optimizer = interrupted(daemon, "half")
    tickets = []

    def handler() -> None:
        with pytest.raises(InvalidRequest, match=r"optimizer\.step\(\)"):
            checkpointer.save(1, wait="durable")
        tickets.append(checkpointer.save(2))
        with pytest.raises(InvalidRequest, match="return from the handler"):
            tickets[0].result(1)

    optimizer.handler = handler
    optimizer.step()
    tickets[0].result(180)
    nn.utils.vector_to_parameters(torch.zeros(12), model.parameters())
    assert checkpointer.restore() == 2
    assert bool((nn.utils.parameters_to_vector(model.parameters()) == 1).all())
    checkpointer.close()


def test_a_step_that_failed_after_a_handler_saved_in_it_fails_the_save(daemon: RunningDaemon) -> None:
    """Half a step is not saved later either: the ticket says so, and the next save goes on."""
    checkpointer, _, optimizer = interrupted(daemon, "failed")
    tickets = []

    def handler() -> None:
        tickets.append(checkpointer.save(1))
        raise SystemExit

    optimizer.handler = handler
    with pytest.raises(SystemExit):
        optimizer.step()
    checkpointer.fence()
    with pytest.warns(UserWarning, match="failed@1 failed"):
        for step in (2, 3):
            checkpointer.save(step, wait="durable")
    assert isinstance(tickets[0].error, TornSnapshot)
    checkpointer.close()


def test_two_signals_in_one_step_are_two_saves(daemon: RunningDaemon) -> None:
    """What several handlers have put off is all made after the step; none is lost, and the loop goes on."""
    checkpointer, _, optimizer = interrupted(daemon, "twice")
    tickets = []

    def handler() -> None:
        tickets.extend(checkpointer.save(step) for step in (1, 2, 3))

    optimizer.handler = handler
    optimizer.step()
    assert len(tickets) == 3
    for ticket in tickets:
        with suppress(GenerationDropped):  # three at once may be more than there are slots for
            ticket.result(180)
    tickets[-1].result(180)
    optimizer.handler = lambda: None
    optimizer.step()
    checkpointer.close()


FORKED = """
import faulthandler, os, sys, torch, warnings
from holdfast import Checkpointer
from holdfast_formats.errors import InvalidRequest
faulthandler.dump_traceback_later(60, exit=True)
warnings.simplefilter("ignore")
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = Checkpointer("forked", {"model": model, "optim": optimizer}, at=sys.argv[1])
checkpointer.save(1)
child = os.fork()
if not child:
    try:
        checkpointer.save(2)
    except InvalidRequest as error:
        optimizer.step()
        checkpointer.close()
        os._exit(0 if "forked" in str(error) else 3)
    os._exit(4)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
checkpointer.save(3, wait="durable")
checkpointer.close()
sys.exit(status)
"""


def test_a_forked_child_is_refused_and_never_waits(daemon: RunningDaemon) -> None:
    """A child that was forked in the middle of a save is told whose the checkpointer is; its parent goes on."""
    done = said("-c", FORKED, str(daemon.socket))
    assert done.status == 0, done.text


LAST_WORDS = """
import faulthandler, os, sys, torch
from holdfast import Checkpointer
faulthandler.dump_traceback_later(120, exit=True)
where, ending = sys.argv[1:]
far = where.startswith("http")
parameters = [torch.rand(1_000_000) for _ in range(4 if far else 24)]
checkpointer = Checkpointer(ending, {"model": {str(i): p for i, p in enumerate(parameters)}}, at=where, fenced=True)
checkpointer.save(1, wait="durable")
checkpointer.save(2)
if ending == "exit":
    sys.exit(0)
if ending == "raise":
    raise RuntimeError("as it happens")
if ending == "daemon-gone":
    os.kill(int(os.environ["DAEMON"]), 19)
"""


@pytest.mark.parametrize("ending", ["exit", "raise"])
def test_a_script_that_ends_without_close_keeps_its_last_save(daemon: RunningDaemon, ending: str) -> None:
    """However it ends, but by os._exit() or SIGKILL: what was saved last is completed, and a warning says so."""
    done = said("-c", LAST_WORDS, str(daemon.socket), ending)
    assert done.status == (1 if ending == "raise" else 0), done.text
    directory = daemon.root / ending / naming.CHECKPOINTS
    wait_until(lambda: (directory / "step-00000002" / naming.COMMIT).exists())
    assert done.text.count("exits without close()") <= 1, done.text


@pytest.mark.parametrize("ending", ["exit", "raise"])
def test_a_script_that_ends_without_close_sends_its_last_save(tmp_path: Path, ending: str) -> None:
    """The same without shared memory: what is sealed has still to be sent when the script has come to its end."""
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon, proxied(daemon.url) as link:
        hide(daemon)
        link.bytes_per_s = 16e6
        done = said("-c", LAST_WORDS, link.url, ending)
        assert done.status == (1 if ending == "raise" else 0), done.text
        directory = daemon.root / ending / naming.CHECKPOINTS
        wait_until(lambda: (directory / "step-00000002" / naming.COMMIT).exists())
    assert done.text.count("was completed before exit") <= 1 and "lost" not in done.text, done.text


def test_a_process_that_ends_does_not_send_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon that it sends to does not answer any more: it says that the save is lost, and ends."""
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        hide(daemon)
        monkeypatch.setenv("DAEMON", str(daemon.process.pid))
        text = "import holdfast.threads.at_exit\nholdfast.threads.at_exit.EXIT_WAIT_S = 2\n" + LAST_WORDS
        done = said("-c", text, daemon.url, "daemon-gone")
        os.kill(daemon.process.pid, 18)
    assert done.status == 0 and "daemon-gone@2" in done.text and "is lost" in done.text, done.text


class Joined:
    """A save that is under way when the process ends."""

    def __init__(self) -> None:
        self.joined = False

    def join(self, timeout: float | None = None) -> bool:
        self.joined = True
        return True


def at_instruction(number: int, act: Callable[[], object]) -> bool:
    """End the process; another thread has its turn before the instruction of this number. False if there are fewer."""
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != at_exit.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        at_exit._end()
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize("ends", [True, False], ids=["one ends", "one begins"])
def test_what_ends_while_the_process_does_disturbs_nothing(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Other threads go on at the end: a save ends, or begins, at any moment of the search for what is under way."""
    monkeypatch.setattr(at_exit, "_tickets", set())
    monkeypatch.setattr(at_exit, "warn", lambda text: None)
    monkeypatch.setattr(at_exit, "own_threads", SimpleNamespace(end=bool))  # those of earlier tests are not to end
    for number in itertools.count():
        monkeypatch.setattr(at_exit, "_unfinished", {})
        first, second = Joined(), Joined()
        at_exit.see_through(first)
        act = partial(at_exit.forget, first) if ends else partial(at_exit.see_through, second)
        if not at_instruction(number, act):
            break
        assert ends or (first.joined and (second.joined or second in at_exit._unfinished.values()))
    assert number > 20 and first.joined and not second.joined


def test_a_failure_that_nobody_was_told_of_is_told_at_the_end(daemon: RunningDaemon) -> None:
    """A script that exits without close() still hears that a save failed in the background."""
    text = LAST_WORDS + "parameters[-1].add_(1)\ncheckpointer._saves._last.join()\n"
    for number in range(8):  # on a busy machine the copy may be over before the change
        done = said("-c", text, str(daemon.socket), f"torn-{number}")
        if f"torn-{number}@2 failed" in done.text:
            break
    assert "SaveWarning" in done.text and "@2 failed" in done.text, done.text


def test_a_process_that_ends_does_not_wait_for_ever_for_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon that does not answer any more, the process says that the save is lost, and ends."""
    with running(tmp_path / "root") as daemon:
        monkeypatch.setenv("DAEMON", str(daemon.process.pid))
        text = "import holdfast.threads.at_exit\nholdfast.threads.at_exit.EXIT_WAIT_S = 2\n" + LAST_WORDS
        done = said("-c", text, str(daemon.socket), "daemon-gone")
        os.kill(daemon.process.pid, 18)
    assert done.status == 0 and "is lost" in done.text, done.text
