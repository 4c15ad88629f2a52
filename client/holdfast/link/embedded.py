"""Embedded daemon: if none is running, a trainer starts one on a local directory, in a separate process.

It outlives the trainer: data staged before the trainer was killed is still committed. It exits after a while without
use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from holdfast.config import default_socket
from holdfast.link import roots
from holdfast_files.objects.address import BucketAddress
from holdfast_formats.errors import EXIT_STATUS, Conflict, DaemonGone, NoSpace
from holdfast_formats.installing import install

EXIT_WHEN_IDLE_S = 30
START_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 2 * START_TIMEOUT_S  # a process that takes longer to start a daemon is stopped
POLL_S = 0.05
LOG = "holdfast-daemon.log"
RETRY_S = 1.0
OWN_FILES_BYTES = 2**20  # of the disk, with which a daemon's own files and catalog get along
# Popen returns when its pipe is closed. A process forked meanwhile by another thread, such as a data loader's worker,
# would inherit the pipe and keep it open: so forks wait.
_spawning = threading.RLock()
os.register_at_fork(before=_spawning.acquire, after_in_parent=_spawning.release, after_in_child=_spawning.release)
_PREFIX = "embedded-"
_FREE_SPACE = "free space, or keep fewer checkpoints"
_IN_USE = EXIT_STATUS[Conflict]


def is_embedded(socket: Path) -> bool:
    return socket.name.startswith(_PREFIX)


def start(root: Path, but: Collection[Path] = (), bucket: BucketAddress | None = None) -> Path:
    """Start a daemon on `root`, or find one that another rank has started; return its socket. For a root in a `bucket`,
    `root` is the directory for what the daemon keeps.

    Waits if another process holds the root (a starting daemon, or a tool). Daemons at the sockets `but` serve other
    roots. Raises `DaemonGone`, with the end of the daemon's log, if none comes up; `NoSpace` if the disk is full.
    """
    if importlib.util.find_spec("holdfast_service") is None or importlib.util.find_spec("fastapi") is None:
        raise DaemonGone(
            "cannot start an embedded daemon: the service is not installed here",
            hint=f"{install('service')}; or start a daemon elsewhere and give its socket or URL as at=",
        )
    try:
        return _start(root.absolute(), but, bucket)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"cannot start an embedded daemon on {root}: {error}", hint=_FREE_SPACE) from error
        raise DaemonGone(
            f"cannot start an embedded daemon on {root}: {error}",
            hint="choose a writable root, and a writable directory as XDG_RUNTIME_DIR if it is set, or start a daemon "
            "elsewhere and give its socket or URL as at=",
        ) from error


def _start(root: Path, but: Collection[Path], bucket: BucketAddress | None) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    at = os.stat(root)  # not its path: what was there before may still be served
    name = hashlib.sha256(f"{at.st_dev}-{at.st_ino}".encode()).hexdigest()[:10]
    directory = default_socket().parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    limit = time.monotonic() + START_TIMEOUT_S
    with _turn(directory / f"{_PREFIX}{name}.lock"):
        _sweep(directory, name)
        while True:
            known = _found(root, but)
            if known is not None:
                return known
            shared = roots.shared_catalog(root)
            if shared is not None:
                raise DaemonGone(
                    f"no daemon of this machine serves {root}, which daemons of several machines share",
                    hint=f"start one here: holdfast serve --root {bucket.label if bucket else root} --catalog {shared}",
                )
            log = _launch(root, directory / f"{_PREFIX}{name}-{uuid.uuid4().hex[:6]}.sock", limit, bucket)
            if log is None:
                continue
            if time.monotonic() > limit:
                raise DaemonGone(
                    f"another process has held {root} for {START_TIMEOUT_S:.0f} s, and no daemon answers there: {log}",
                    hint=f"stop that process, or find out why its daemon does not start; the log is {root / LOG}",
                )
            _await(root, but)


def _found(root: Path, but: Collection[Path]) -> Path | None:
    known = roots.running_socket(root)
    return known if known is not None and known not in but and roots.answers(known) else None


def _await(root: Path, but: Collection[Path]) -> None:
    """Wait until the process that holds the root answers or ends."""
    limit = time.monotonic() + RETRY_S
    while _found(root, but) is None and time.monotonic() < limit:
        time.sleep(POLL_S)


def _sweep(directory: Path, name: str) -> None:
    """Remove sockets left behind by killed daemons."""
    for path in directory.glob(f"{_PREFIX}{name}-*.sock"):
        if not roots.answers(path):
            path.unlink(missing_ok=True)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Only one process of this user starts a daemon on the root. `DaemonGone` if another one does for too long."""
    limit = time.monotonic() + TURN_TIMEOUT_S
    with open(lock, "w") as file:
        while not _locked(file):
            if time.monotonic() > limit:
                raise DaemonGone(
                    f"another process has been starting a daemon for {TURN_TIMEOUT_S:.0f} s: it holds {lock}",
                    hint=f"find it with `fuser {lock}`; it may be stopped, so end it or continue it with `kill -CONT`",
                )
            time.sleep(POLL_S)
        try:
            yield
        finally:  # by name: a process that was forked meanwhile, a loader's worker, has the file open too
            fcntl.flock(file, fcntl.LOCK_UN)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _launch(root: Path, socket: Path, limit: float, bucket: BucketAddress | None) -> str | None:
    """Start a daemon. Returns None once it answers, or the end of its log if another process holds the root."""
    place = ["--root", str(root)] if bucket is None else ["--root", bucket.label, "--state", str(root)]
    command = [sys.executable, "-m", "holdfast_service", *place, "--socket", str(socket)]
    command += ["--listen", "none", "--exit-when-idle", str(EXIT_WHEN_IDLE_S)]
    with open(root / LOG, "ab") as log:
        process = _spawned(command, log)
    while roots.running_socket(root) != socket or not roots.answers(socket):
        status = process.poll()
        if status == _IN_USE:
            return (root / LOG).read_text(errors="replace")[-1000:]
        if status is not None or time.monotonic() > limit:
            tail = (root / LOG).read_text(errors="replace")[-1000:]
            what = f"exited with status {status}" if status is not None else f"did not answer within {START_TIMEOUT_S:.0f} s"
            detail, hint = f"the embedded daemon on {root} {what}: {tail}", f"its log is {root / LOG}"
            if shutil.disk_usage(root).free < OWN_FILES_BYTES:  # then the log may lack its end, with the reason
                raise NoSpace(f"the disk of {root} is full: {detail}", hint=f"{_FREE_SPACE}; {hint}")
            raise DaemonGone(detail, hint=hint)
        time.sleep(POLL_S)
    process.returncode = 0  # it outlives us by design: keep Popen from warning that we did not wait for it
    return None


def _spawned(command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    with _spawning:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
