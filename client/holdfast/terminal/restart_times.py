"""Measurements of `holdfast bench restart`: from the start of a trainer to its first save after a failure.

A trainer saves, and is killed. It is started again while its daemon still has its memory, and once more after the daemon has
ended, as on a machine that was started again: it starts a daemon, and reads from the storage, past the page cache.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.link import roots
from holdfast.link.exchange import connect, peer_of
from holdfast_formats.errors import DaemonGone, DeadlineExceeded, InvalidRequest, StorageFailed

TRAINER = "holdfast.demo.restarted_trainer"
ROUNDS = 3
BYTES_MIN = 2**20
HINT = "`holdfast doctor` checks this machine"
ANSWER_S = 300.0  # of one trainer, from its start to its save
END_S = 60.0  # of a daemon


class Restart(NamedTuple):
    """Seconds of each phase of a start. `torch` (with Python) and `state` are not Holdfast's. `source` is where the bytes
    came from.
    """

    torch: float
    holdfast: float
    state: float
    restore: float
    prepare: float
    save: float
    source: str

    @property
    def own(self) -> float:
        """What Holdfast adds from the start until the next step can run."""
        return self.holdfast + self.restore


def measure(directory: Path, size: int, on_step: Callable[[str], None] = lambda _: None) -> dict[str, Restart]:
    """Medians of three rounds: after the trainer was killed, and after the machine was started again.

    `size` bytes are saved, in equal tensors, below `directory`, where nothing is left. Raises `InvalidRequest` for too few
    of them, and `StorageFailed` with what a trainer said.
    """
    if size < BYTES_MIN:
        raise InvalidRequest(f"{size} bytes are too few for a measurement", hint=f"use at least {BYTES_MIN}")
    found: dict[str, list[Restart]] = {"trainer killed": [], "machine started again": []}
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix=".holdfast-bench-", dir=directory, ignore_cleanup_errors=True) as made:
            root, moved = Path(made, "root"), Path(made, "moved")
            try:
                on_step(f"saving, round {number + 1} of {ROUNDS}")
                _train(root, size)
                on_step("restarting the trainer")
                found["trainer killed"].append(_restart(root, size))
                _end_daemon(root)
                root.rename(moved)  # so that no process that kept memory for it is found
                _forget_pages(moved)
                on_step("restarting all")
                found["machine started again"].append(_restart(moved, size))
            finally:
                _end_daemon(root)
                _end_daemon(moved)
    return {name: _median(restarts) for name, restarts in found.items()}


def _median(restarts: Sequence[Restart]) -> Restart:
    return Restart(
        torch=statistics.median(one.torch for one in restarts),
        holdfast=statistics.median(one.holdfast for one in restarts),
        state=statistics.median(one.state for one in restarts),
        restore=statistics.median(one.restore for one in restarts),
        prepare=statistics.median(one.prepare for one in restarts),
        save=statistics.median(one.save for one in restarts),
        source=restarts[0].source,
    )


def _restart(root: Path, size: int) -> Restart:
    """As `_train`, where there is a checkpoint. A start that restored nothing is no measurement."""
    restart = _train(root, size)
    if not restart.source:
        raise StorageFailed(f"the trainer restored nothing from {root}", hint=HINT)
    return restart


def _train(root: Path, size: int) -> Restart:
    """Start a trainer, and kill it once it has saved."""
    command = [sys.executable, "-m", TRAINER, str(root), str(size // 2**20), str(time.monotonic())]
    with _killed(command) as trainer:
        assert trainer.stdout is not None and trainer.stderr is not None
        if not select.select([trainer.stdout], [], [], ANSWER_S)[0]:
            raise DeadlineExceeded(f"the trainer has not saved within {ANSWER_S:.0f} s", hint=HINT)
        line = trainer.stdout.readline()
        if not line:
            said = trainer.stderr.read().strip().rpartition("\n")[2]
            raise StorageFailed(f"the trainer ended: {said}", hint=HINT)
    return Restart(**json.loads(line))


@contextmanager
def _killed(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the block's end, as a scheduler does it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _end_daemon(root: Path) -> None:
    """Stop the daemon that a trainer has started for this root, if there is one, and wait for its end."""
    path = roots.running_socket(root) if root.is_dir() else None
    if path is None:
        return
    with suppress(DaemonGone, ProcessLookupError), connect(path) as connection:
        pid = peer_of(connection).pid
        os.kill(pid, signal.SIGTERM)
        limit = time.monotonic() + END_S
        while time.monotonic() < limit:
            os.kill(pid, 0)
            time.sleep(0.05)


def _forget_pages(directory: Path) -> None:
    """Files that are synced leave the page cache, for any user."""
    for path in directory.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
