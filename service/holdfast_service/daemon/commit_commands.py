"""Runs a command of the operator's after each commit, one after the other, and never in the way of a save.

Each checkpoint's command is run once, by the node that committed it. A daemon that is started again does not run it for what
was committed before. What fails, takes too long, or cannot be run any more is an event.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from holdfast_formats import naming
from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.operations import Level

log = logging.getLogger(__name__)

WAITING_MAX = 64  # commits that wait for their command; of more, the oldest go without
RECORDED_S = 10.0  # how long the catalog may take to know of a commit before the command may ask for it
GRACE_S = 2.0  # between the request to end and the kill
KILLED_S = 5.0  # how long a killed command is waited for
TAIL_BYTES = 4096  # of what a command has printed, in the log
READ_BYTES = 65_536
DRAINED = 64  # times of that, after a command has ended: what has left its process group may print for ever
LOOK_S = 3600.0

# Ends with the daemon, also where that is killed: the kernel kills it then.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the daemon has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Command(NamedTuple):
    """What to run: the words, of which the first is a program's path, the environment, and for how long at most."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    seconds_max: float


class CommandNews(Protocol):
    """Where it is told what became of commands."""

    def add(
        self, kind: str, text: str, run: str | None = None, step: int | None = None, level: Level = "info", **detail: Any
    ) -> None: ...
    def record_once(self, kind: str, text: str, run: str, step: int, **detail: Any) -> bool: ...


class CommitCommands:
    """The thread that runs the command. Other threads tell it of commits, and never wait for it."""

    def __init__(self, command: Command, news: CommandNews, recorded: Callable[[float], bool], root: Path) -> None:
        """`recorded` waits so many seconds at most until the catalog knows of all commits, and says whether it does."""
        self._command, self._news, self._recorded, self._root = command, news, recorded, root
        self._changed = threading.Condition()
        self._waiting: deque[Manifest] = deque()
        self._running = False
        self._wake, self._woken = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="holdfast-on-commit", daemon=True)
        self._thread.start()

    def committed(self, made: Manifest) -> None:
        """A checkpoint stands. Returns at once."""
        late = None
        with self._changed:
            if self._closed:
                late = made
            else:
                if len(self._waiting) == WAITING_MAX:
                    late = self._waiting.popleft()
                self._waiting.append(made)
                self._changed.notify_all()
        if late is not None:
            why = "the daemon is ending" if late is made else f"{WAITING_MAX} newer commits wait already"
            self._failed(late, f"was not run: {why}")

    def busy(self) -> bool:
        """Whether a command runs, or is going to."""
        with self._changed:
            return self._running or bool(self._waiting)

    def close(self) -> None:
        """End the command that runs, and run no other."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        os.write(self._woken, b"x")
        self._thread.join()
        for made in left:
            self._failed(made, "was not run: the daemon ended before")
        os.close(self._wake)
        os.close(self._woken)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                made, self._running = self._waiting.popleft(), True
            try:
                self._run(made)
            except Exception as error:
                log.exception("the command of --on-commit for %s@%s", made.run, made.step)
                self._failed(made, f"could not be run: {error}")

    def _run(self, made: Manifest) -> None:
        if not self._is_mine(made):
            return
        began = time.monotonic()
        ended = self._ended(made)
        log.info(
            "--on-commit for %s@%s: %s after %.1f s", made.run, made.step, ended.how or "done", time.monotonic() - began
        )
        if ended.how:
            self._failed(made, ended.how)
            # Only the log has it: who may read a run's events need not be allowed to read what a command prints.
            log.warning("--on-commit for %s@%s printed at last: %r", made.run, made.step, ended.output)

    def _is_mine(self, made: Manifest) -> bool:
        """Whether this checkpoint's command is run now: another node that finished the same commit may have done so."""
        if not self._recorded(RECORDED_S):
            log.warning("--on-commit for %s@%s: the catalog does not know of it yet", made.run, made.step)
        text = f"the command of --on-commit was started for step {made.step}"
        try:
            return self._news.record_once(
                "commit-command-started", text, made.run, made.step, attempt=made.attempt, created=made.created
            )
        except CatalogUnavailable as away:
            log.warning("--on-commit for %s@%s: its start is not recorded: %s", made.run, made.step, away.detail)
            return True

    def _ended(self, made: Manifest) -> _End:
        words = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *self._command.words]
        process = subprocess.Popen(
            words,
            env={**self._command.environment, **_about(made, self._root)},
            cwd=self._root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = _Output(process.stdout)
        why = "could not be watched"
        try:
            exited = os.pidfd_open(process.pid)
            try:
                why = self._watch(exited, output)
                if why:
                    _signal(process, signal.SIGTERM)
                    _wait(exited, GRACE_S)
            finally:
                os.close(exited)
        finally:
            status = _killed(process)  # with what it has left running
            output.drain()
            process.stdout.close()
        if not why and status:
            why = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        return _End(why, output.tail.decode(errors="replace"))

    def _watch(self, exited: int, output: _Output) -> str:
        """Read what it prints until it ends; why it is ended before, empty if it is not."""
        limit = time.monotonic() + self._command.seconds_max
        with selectors.DefaultSelector() as selector:
            for what in (exited, self._wake, output.fd):
                selector.register(what, selectors.EVENT_READ)
            while True:
                left = min(max(limit - time.monotonic(), 0.0), LOOK_S)  # the system takes no longer times than some weeks
                ready = {key.fd for key, _ in selector.select(left)}
                if self._wake in ready:
                    return "was ended, because the daemon ended"
                if exited in ready:
                    return ""
                if output.fd in ready and not output.read():
                    selector.unregister(output.fd)
                if time.monotonic() >= limit:
                    return f"was ended after {self._command.seconds_max:g} s (--on-commit-timeout)"

    def _failed(self, made: Manifest, how: str) -> None:
        text = f"the command of --on-commit for step {made.step} {how}"
        self._news.add("commit-command-failed", text, made.run, made.step, "warning", attempt=made.attempt, why=how)


class _End(NamedTuple):
    """How it ended, empty if as it should; and the end of what it printed."""

    how: str
    output: str


class _Output:
    """What a command prints, of which the end is kept."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.fd, self.tail = pipe.fileno(), b""
        os.set_blocking(self.fd, False)

    def read(self) -> bool:
        """Take what is there; False at its end."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        return bool(chunk)

    def drain(self) -> None:
        """Take what is still there."""
        with suppress(OSError):
            for _ in range(DRAINED):
                before = self.tail
                if not self.read() or self.tail is before:
                    return


def _about(made: Manifest, root: Path) -> dict[str, str]:
    return {
        "HOLDFAST_RUN": made.run,
        "HOLDFAST_STEP": str(made.step),
        "HOLDFAST_ATTEMPT": str(made.attempt),
        "HOLDFAST_PATH": str(root / naming.checkpoint_path(made.run, made.step)),
        "HOLDFAST_GROUPS": ",".join(made.groups),
        "HOLDFAST_BYTES": str(made.bytes),
    }


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the command and all that it started: it is not reaped yet, so its number is still its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _killed(process: subprocess.Popen[bytes]) -> int:
    """Kill a command, if it still runs, and all that it started; returns its status."""
    _signal(process, signal.SIGKILL)
    try:
        return process.wait(KILLED_S)
    except subprocess.TimeoutExpired:  # in a call that the kernel does not interrupt, as on a file system that hangs
        log.warning("the command of --on-commit with the process number %d does not end", process.pid)
        return -signal.SIGKILL


def _wait(exited: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(exited, selectors.EVENT_READ)
        selector.select(seconds)
