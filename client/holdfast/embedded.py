"""An embedded daemon: with none at the socket, a trainer starts one on a local directory, in a process of its own.

It is a process and not a thread so that it outlives the trainer: what was staged when the trainer was killed is still
committed. It ends by itself when nobody has needed it for a while.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone

from .config import default_socket

EXIT_WHEN_IDLE_S = 30
START_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG = "holdfast-daemon.log"
_PREFIX = "embedded-"


def running_socket(root: Path) -> Path | None:
    """The socket of the daemon that says it serves `root`, or None. It may be gone: only a connection tells."""
    try:
        about = json.loads((root / naming.DAEMON_FILE).read_bytes())
        return Path(about["socket"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_embedded(socket: Path) -> bool:
    """Whether the daemon at this socket was started by trainers."""
    return socket.name.startswith(_PREFIX)


def start(root: Path) -> Path:
    """Start a daemon on `root`, or find the one another rank started meanwhile; return its socket.

    Raises `DaemonGone`, with the end of the daemon's log, when it does not come up.
    """
    if importlib.util.find_spec("holdfast_service") is None or importlib.util.find_spec("fastapi") is None:
        raise DaemonGone(
            "the daemon is not installed here", hint="pip install 'holdfast-checkpoint[service]', or start one elsewhere"
        )
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    socket = default_socket().parent / f"{_PREFIX}{hashlib.sha256(bytes(root)).hexdigest()[:16]}.sock"
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _turn(socket.with_suffix(".lock")):
        known = running_socket(root)
        if known is not None and _answers(known):
            return known
        _launch(root, socket)
    return socket


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """One rank of the node starts the daemon, the others wait and find it."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _launch(root: Path, socket: Path) -> None:
    command = [sys.executable, "-m", "holdfast_service", "--root", str(root), "--socket", str(socket)]
    command += ["--listen", "none", "--exit-when-idle", str(EXIT_WHEN_IDLE_S)]
    with open(root / LOG, "ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    limit = time.monotonic() + START_TIMEOUT_S
    while not _answers(socket):
        status = process.poll()
        if status is not None or time.monotonic() > limit:
            tail = (root / LOG).read_text(errors="replace")[-1000:]
            what = f"ended with status {status}" if status is not None else f"did not come up in {START_TIMEOUT_S:.0f} s"
            raise DaemonGone(f"the embedded daemon on {root} {what}: {tail}", hint=f"its log is {root / LOG}")
        time.sleep(POLL_S)
    process.returncode = 0  # it outlives us by design: keep Popen from warning that we did not wait for it


def _answers(path: Path) -> bool:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
