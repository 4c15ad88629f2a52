"""No thread of the client is in torch's code when the interpreter ends, and none keeps it from ending."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.threads import own_threads
from tests.daemons import RunningDaemon, hide, running
from tests.forked import Forked

CLIENT = Path(holdfast.__file__).parent
# Of commands alone: they call no torch, and a command ends without them.
BESIDE = {"terminal/completion.py", "terminal/console.py", "rest/waiting_notice.py"}
LIMIT_S = 240.0
COMPUTES = """
import torch
from holdfast.threads import at_exit, own_threads
from holdfast.stage.background_copy import BackgroundCopy

class Batch:
    def do(self):
        for _ in range(3000):
            for tensor in tensors:
                tensor.add_(1)

tensors = [torch.ones(64, 64) for _ in range(4)]
BackgroundCopy((), lambda error: print("copied", error, flush=True), [Batch()]).start()
"""
TRAINS = """
import os, signal, sys, torch, warnings
from holdfast import Checkpointer
warnings.simplefilter("ignore")
at, ending, number, pid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
state = {"model": {f"w{i}": torch.ones(64, 64) for i in range(3000)}}
checkpointer = Checkpointer(f"{ending}-{number}", state, at=at)
if ending == "prepared":
    checkpointer.restore()
if ending == "closed":
    checkpointer.save(number)
    checkpointer.close()
if ending == "raised":
    checkpointer.save(number)
    raise RuntimeError("as it happens")
if ending == "in-a-save":
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    checkpointer.save(number)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    for step in range(1, 1000):
        checkpointer.save(number + step)
if ending.startswith("frozen"):
    checkpointer.save(number, wait="durable")
    os.kill(pid, signal.SIGSTOP)
    if ending == "frozen-prepares":
        checkpointer.prepare()
    elif ending == "frozen-saves":
        assert checkpointer.save(number + 1).done
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("ends") / "root", listen="127.0.0.1:0") as daemon:
        try:
            yield daemon
        finally:
            daemon.thaw()


def ended(script: str, *words: object) -> tuple[int, str]:
    """The exit status of a process of its own, and what it said; it may not hang."""
    with tempfile.TemporaryFile() as output:
        process = Forked(["-c", script, *words], output=output.fileno())
        try:
            status = process.wait(LIMIT_S)
        finally:
            process.kill()
        output.seek(0)
        return status, output.read().decode()


def test_a_process_does_not_end_while_a_thread_of_the_client_is_in_torch() -> None:
    """Such a thread would die there, and torch's C++ abort the process."""
    for _ in range(2):
        status, said = ended(COMPUTES)
        assert status == 0 and "copied None" in said, said


@pytest.mark.parametrize("ending", ["prepared", "closed", "raised", "in-a-save"])
def test_a_script_that_ends_in_the_midst_of_it_is_not_aborted(daemon: RunningDaemon, ending: str) -> None:
    """Memory is being prepared in that moment, or a save copied: its status is the one that it would have without us."""
    for number in range(2):
        status, said = ended(TRAINS, daemon.socket, ending, 1 + 10_000 * number, 0)
        assert status == (1 if ending == "raised" else 0), said


@pytest.mark.parametrize(("at", "ending"), [("socket", "frozen-prepares"), ("socket", "frozen-saves"), ("url", "frozen")])
def test_a_process_ends_though_its_daemon_is_frozen(daemon: RunningDaemon, at: str, ending: str) -> None:
    """Threads that wait for an answer are told to end; one that cannot hear it is left after `END_WAIT_S`."""
    place, hidden = getattr(daemon, at), daemon.socket.with_suffix(".hidden")
    if at == "url":
        hide(daemon)
    try:
        status, said = ended(TRAINS, place, ending, 1, daemon.process.pid)
    finally:
        daemon.thaw()
        if at == "url":
            os.rename(hidden, daemon.socket)
    assert status == 0 and "lost" not in said, said


def test_threads_are_told_to_end_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hears it ends; one that computes is waited for; one that does neither is left."""
    monkeypatch.setattr(own_threads, "END_WAIT_S", 0.0)
    monkeypatch.setattr(own_threads, "_running", {})  # not those of checkpointers that other tests left open
    told, never, computed = threading.Event(), threading.Event(), threading.Event()
    begun = threading.Event()

    def compute() -> None:
        with own_threads.computing():
            begun.set()
            told.wait(LIMIT_S)
            time.sleep(0.3)
            computed.set()

    threads = [own_threads.begin(compute, "computes", told.set), own_threads.begin(never.wait, "waits")]
    begun.wait(LIMIT_S)
    own_threads.end()
    assert computed.is_set() and threads[1].is_alive()
    never.set()
    for thread in threads:
        thread.join(LIMIT_S)


def test_every_thread_of_the_client_begins_in_one_place() -> None:
    """Which can tell it to end, therefore."""
    begin = re.compile(r"threading\.(Thread|Timer)\(")
    found = {str(path.relative_to(CLIENT)) for path in CLIENT.rglob("*.py") if begin.search(path.read_text())}
    assert found == BESIDE | {"threads/own_threads.py"}
