"""The demo's processes: trainers that are killed on purpose and never left behind, and the daemon that outlives them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx

from .config import DAEMON_IDLE_S, DAEMON_START_S_MAX, child_environment

SOCKET_PATH_BYTES_MAX = 100  # the kernel's own limit for a unix socket's path is 108
KILL_S_MAX = 10.0
POLL_S = 0.05


class DemoFailed(Exception):
    """A part of the demo did not do what it should; `log` is where to look."""

    def __init__(self, what: str, log: Path | None = None) -> None:
        super().__init__(what)
        self.log = log


@contextmanager
def leaving_in_order() -> Iterator[None]:
    """Inside the block SIGTERM raises an exception, so that started processes are ended too."""

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProcessId(NamedTuple):
    """A process ID with the start time, because numbers are reused."""

    pid: int
    started: str


class LaunchedJob:
    """A launcher and every process below it, killed together when the block ends."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with open(log, "ab") as output:
            self._launcher = subprocess.Popen(
                command, stdout=output, stderr=output, env=child_environment(), start_new_session=True
            )
        self.family = {identity for identity in [identify(self._launcher.pid)] if identity}

    def __enter__(self) -> LaunchedJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def poll(self) -> int | None:
        """The launcher's exit status, None while it runs. Records new descendants."""
        self.family |= set(descendants(self._launcher.pid))
        return self._launcher.poll()

    def kill(self) -> int:
        """SIGKILL the launcher and all below it, wait until they are gone, and return their number."""
        self.poll()
        living = [identity for identity in self.family if is_alive(identity)]
        for identity in sorted(living, key=lambda i: i.pid != self._launcher.pid):  # the launcher first: it would respawn
            if is_alive(identity):
                os.kill(identity.pid, signal.SIGKILL)
        self._launcher.wait()
        deadline = time.monotonic() + KILL_S_MAX
        while any(is_alive(identity) for identity in living):
            if time.monotonic() > deadline:
                raise DemoFailed(f"processes {[i.pid for i in living]} still run after SIGKILL", self.log)
            time.sleep(POLL_S)
        return len(living)


def identify(pid: int) -> ProcessId | None:
    """The living process with this number; None if there is none or it is a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else ProcessId(pid, after_name[19])


def is_alive(identity: ProcessId) -> bool:
    return identify(identity.pid) == identity


def descendants(pid: int) -> Iterator[ProcessId]:
    """The living children of a process, their children, and so on."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        identity = identify(child)
        if identity:
            yield identity
        yield from descendants(child)


class DemoDaemon(NamedTuple):
    """A daemon that runs: its addresses, what it keeps, and its process."""

    url: str
    socket: Path
    root: Path
    process: subprocess.Popen[bytes]


def start_daemon(directory: Path) -> DemoDaemon:
    """Start `holdfast serve` on `directory/data` in a session of its own, and wait until it answers."""
    root, log = directory / "data", directory / "daemon.log"
    root.mkdir(mode=0o700)
    path = socket_path(directory)
    address = f"127.0.0.1:{free_port()}"
    places = ["--root", str(root), "--listen", address, "--socket", str(path)]
    command = [sys.executable, "-m", "holdfast_service", *places, "--exit-when-idle", str(DAEMON_IDLE_S)]
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=child_environment(), start_new_session=True)
    daemon = DemoDaemon(f"http://{address}", path, root, process)
    deadline = time.monotonic() + DAEMON_START_S_MAX
    try:
        while not answers(daemon.url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the daemon did not start (exit status {process.poll()})", log)
            time.sleep(POLL_S)
    except BaseException:
        stop_daemon(daemon)
        raise
    return daemon


def socket_path(directory: Path) -> Path:
    """A path for the daemon's socket: in the directory, or in a temporary one where that path is too long."""
    path = directory / "holdfast.sock"
    too_long = len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX
    return Path(tempfile.mkdtemp(prefix="holdfast-")) / path.name if too_long else path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def stop_daemon(daemon: DemoDaemon) -> None:
    """Ask the daemon to end, insist after a while."""
    daemon.process.terminate()
    try:
        daemon.process.wait(KILL_S_MAX)
    except subprocess.TimeoutExpired:
        daemon.process.kill()
        daemon.process.wait(KILL_S_MAX)
