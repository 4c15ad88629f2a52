"""Runs an operator's command with a time limit, and kills it and its descendants with the daemon."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

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
    """A command: its words, of which the first is a program's path, its environment, and its time limit."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    seconds_max: float
    limited_by: str = "--on-commit-timeout"


class CommandEnd(NamedTuple):
    """The error of its end, empty if there is none; and the end of its output."""

    how: str
    output: str


def run(command: Command, directory: Path, stop: int, more: Mapping[str, str], given: bytes = b"") -> CommandEnd:
    """Run a command in a directory, with `given` as its input and `more` in its environment, and return how it ended.

    It is killed when its time is over, or when the descriptor `stop` can be read.
    """
    words = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command.words]
    with open(os.memfd_create("holdfast-input"), "w+b") as read:
        read.write(given)
        read.seek(0)
        process = subprocess.Popen(
            words,
            env={**command.environment, **more},
            cwd=directory,
            stdin=read,
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
            why = _watch(exited, stop, output, command)
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
    return CommandEnd(why, output.tail.decode(errors="replace"))


def _watch(exited: int, stop: int, output: _Output, command: Command) -> str:
    """Read its output until it ends; returns why it must be killed before, or ""."""
    limit = time.monotonic() + command.seconds_max
    with selectors.DefaultSelector() as selector:
        for what in (exited, stop, output.fd):
            selector.register(what, selectors.EVENT_READ)
        while True:
            left = min(max(limit - time.monotonic(), 0.0), LOOK_S)  # the system takes no longer times than some weeks
            ready = {key.fd for key, _ in selector.select(left)}
            if stop in ready:
                return "was ended, because the daemon ended"
            if exited in ready:
                return ""
            if output.fd in ready and not output.read():
                selector.unregister(output.fd)
            if time.monotonic() >= limit:
                return f"was ended after {command.seconds_max:g} s ({command.limited_by})"


class _Output:
    """The end of a command's output."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.fd, self.tail = pipe.fileno(), b""
        os.set_blocking(self.fd, False)

    def read(self) -> bool:
        """Read available output; False at its end."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        return bool(chunk)

    def drain(self) -> None:
        with suppress(OSError):
            for _ in range(DRAINED):
                before = self.tail
                if not self.read() or self.tail is before:
                    return


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the command's process group, whose number is valid because the command is not reaped yet."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _killed(process: subprocess.Popen[bytes]) -> int:
    """Kill a command, if it still runs, and all its descendants; returns its status."""
    _signal(process, signal.SIGKILL)
    try:
        return process.wait(KILLED_S)
    except subprocess.TimeoutExpired:  # in a call that the kernel does not interrupt, as on a file system that hangs
        log.warning("the command with process ID %d does not end", process.pid)
        return -signal.SIGKILL


def _wait(exited: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(exited, selectors.EVENT_READ)
        selector.select(seconds)
