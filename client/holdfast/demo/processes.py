"""The demo's processes: trainers and machines that are killed on purpose, and the daemon that outlives its trainers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
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
        return kill_family(self._launcher, self.family, self.log)


def kill_family(first: subprocess.Popen[bytes], family: Iterable[ProcessId], log: Path) -> int:
    """SIGKILL these processes, the first one before those that it would start again; their number, once all are gone."""
    living = [identity for identity in family if is_alive(identity)]
    for identity in sorted(living, key=lambda i: i.pid != first.pid):
        if is_alive(identity):
            os.kill(identity.pid, signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + KILL_S_MAX
    while any(is_alive(identity) for identity in living):
        if time.monotonic() > deadline:
            raise DemoFailed(f"processes {[i.pid for i in living]} still run after SIGKILL", log)
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
    """A daemon that runs: its addresses, its root as `--root` takes it, its process, and its log."""

    url: str
    socket: Path
    root: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> int:
        """SIGKILL it and the process that holds its shared memory, as the end of the machine would; their number."""
        pid = self.process.pid
        family = [identity for identity in (identify(pid), *descendants(pid)) if identity]
        return kill_family(self.process, family, self.log)


def start_daemon(directory: Path, root: str, *flags: str) -> DemoDaemon:
    """Start `holdfast serve` in a session of its own, with socket and log in the directory; wait until it answers."""
    log, path = directory / "daemon.log", socket_path(directory)
    address = f"127.0.0.1:{free_port()}"
    places = ["--root", root, "--listen", address, "--socket", str(path), *flags]
    command = [sys.executable, "-m", "holdfast_service", *places, "--exit-when-idle", str(DAEMON_IDLE_S)]
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=child_environment(), start_new_session=True)
    daemon = DemoDaemon(f"http://{address}", path, root, process, log)
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
