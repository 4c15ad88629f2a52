"""A real daemon in a process of its own, for tests."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, NoSuchCheckpoint
from tests.forked import PYTHON, Forked

START_TIMEOUT_S = 240.0  # a start takes two seconds, and many times that beside other tests
WAIT_TIMEOUT_S = 180.0  # of anything else: only what has failed takes so long
PAUSE_S, PAUSE_MAX_S = 0.01, 0.1
DOORS = frozenset({"--behind-tls", "--insecure-no-tokens", "--loopback-open"})
PORTS = (15_000, 32_000)  # below those that Linux takes for connections and for servers that name none


def freeze(process: subprocess.Popen[Any] | Forked) -> None:
    """Stop a process; returns when none of its threads runs any more: the signal alone asks one of them to stop the others,
    which may answer meanwhile.
    """
    process.send_signal(signal.SIGSTOP)
    limit = time.monotonic() + START_TIMEOUT_S
    while any(state not in "TZ" for state in _states(process.pid)):
        assert time.monotonic() < limit, "it did not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that ended meanwhile
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


class RunningDaemon:
    """A daemon that serves `root`; `log` is what it wrote. `before` are words of a command that becomes the daemon.

    Unless it is `closed`, as daemons are by themselves, or flags say whom it asks for a token, a test may ask it as anybody,
    over any proxy.
    """

    def __init__(
        self,
        root: Path,
        *flags: str,
        listen: str = "none",
        before: tuple[str, ...] = (),
        closed: bool = False,
    ) -> None:
        self.root, self.socket, self.log = root, root.parent / f"{root.name}.sock", root.parent / f"{root.name}.log"
        if listen.startswith("127.") and not closed and not DOORS.intersection(flags):
            flags = (*flags, "--loopback-open")
        self.process: subprocess.Popen[bytes] | Forked
        command = ["-m", "holdfast_service", "--root", str(root), "--socket", str(self.socket), "--listen", listen, *flags]
        with open(self.log, "ab") as log:  # SIGABRT has it say there where every thread stands
            if before:
                about, words = {**os.environ, "PYTHONFAULTHANDLER": "1"}, [*before, PYTHON, *command]
                self.process = subprocess.Popen(words, stdout=log, stderr=log, env=about)
            else:
                self.process = Forked(command, output=log.fileno(), kind="daemon")
        limit, pause_s = time.monotonic() + START_TIMEOUT_S, PAUSE_S
        while not self.about:
            assert self.process.poll() is None, self.log.read_text()
            if time.monotonic() > limit:
                self.process.kill()  # or it would disturb the tests that follow
                self.process.wait()
                raise AssertionError(f"the daemon did not come up: {self.log.read_text()}")
            pause_s = paused(pause_s)

    @property
    def about(self) -> dict:
        """What the daemon says of itself, once it serves."""
        for path in self.root.glob(".holdfast*.json"):
            if naming.parse_daemon_file(path.name) is None:
                continue
            try:
                found = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            if found["pid"] == self.process.pid:
                return dict(found)
        return {}

    @property
    def url(self) -> str:
        return str(self.about["url"])

    def stop(self) -> int:
        """Ask it to end and wait; returns its exit status. Fails with its log, and where it stands, when it does not."""
        self.process.terminate()
        try:
            return self.process.wait(WAIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
        raise AssertionError(f"the daemon did not end: {self.log.read_text()}")

    def freeze(self) -> None:
        freeze(self.process)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(
    root: Path, *flags: str, listen: str = "none", closed: bool = False, before: tuple[str, ...] = ()
) -> Iterator[RunningDaemon]:
    """A daemon for the length of a block; the block's end stops it in an orderly way and checks that it did."""
    daemon = RunningDaemon(root, *flags, listen=listen, closed=closed, before=before)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            status = daemon.stop()
            assert status == 0, daemon.log.read_text()


def copy_served(source: Path, target: Path) -> None:
    """Copy what a daemon may still write to; what is renamed or removed meanwhile is left out."""
    try:
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    except shutil.Error as failed:
        gone = os.strerror(errno.ENOENT)
        if any(gone not in why for _, _, why in failed.args[0]):
            raise


def shared_memory(daemon: RunningDaemon) -> int:
    """Bytes of memory that the segments of its ranks have."""
    found = {}
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the daemon has closed it meanwhile
            if "memfd:holdfast" in os.readlink(fd):
                about = fd.stat()
                found[about.st_ino] = about.st_blocks * 512
    return sum(found.values())


def hide(daemon: RunningDaemon) -> None:
    """From here on the daemon's socket cannot be reached by its path, as on another machine."""
    os.rename(daemon.socket, daemon.socket.with_suffix(".hidden"))


def free_port() -> int:
    """A port of the loopback that is free, and stays so between two servers: one that the system gives to nobody unasked."""
    while True:
        port = random.randrange(*PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_until(condition, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Poll a condition until it holds; fails the test when it does not in time. It does not hold while the catalog that it
    asks is away, has just come back, or has not heard of a checkpoint yet.
    """
    limit, pause_s = time.monotonic() + timeout_s, PAUSE_S
    away: CheckpointError | None = None
    while True:
        try:
            if condition():
                return
        except (CatalogUnavailable, NoSuchCheckpoint) as error:
            away = error
        assert time.monotonic() < limit, f"what was waited for did not happen{f'; {away}' if away else ''}"
        pause_s = paused(pause_s)


def paused(pause_s: float) -> float:
    """Pause between two looks at what shall happen; how long the next pause is. What takes long is asked for seldom: every
    look takes processor from what is waited for.
    """
    time.sleep(pause_s)
    return min(1.5 * pause_s, PAUSE_MAX_S)


def wait_until_read_back(daemon: RunningDaemon, run: str, step: int) -> None:
    """Until the daemon, which must listen, has verified a checkpoint, and nobody reads it any more of itself."""
    with Api(daemon.url) as api:
        wait_until(lambda: any(one.step == step and one.verified for one in api.checkpoints(run)))


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A directory with a short name, for roots and sockets, where trainers of this process start their daemons meanwhile.

    Its files may not all go: a thread of an earlier test's `Checkpointer` that lost its daemon starts the next one in here.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hf-", ignore_cleanup_errors=True) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", made)
        yield Path(made)
