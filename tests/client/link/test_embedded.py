"""embedded: a daemon is started while other threads fork, as data loaders with workers do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.link import embedded
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone, NoSpace
from holdfast_formats.root_files import DaemonFile, decode
from tests.daemons import WAIT_TIMEOUT_S, runtime_directory, wait_until


@contextmanager
def forked_child() -> Iterator[int]:
    """A child that has forked and lives on, with every descriptor that its parent had."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def root() -> Iterator[Path]:
    """A root on which a daemon may be started; it is ended."""
    with runtime_directory() as made:
        root = made / "root"
        yield root
        file = decode(DaemonFile, (root / naming.DAEMON_FILE).read_bytes())
        assert file is not None
        os.kill(file.pid, signal.SIGTERM)
        wait_until(lambda: not (root / naming.DAEMON_FILE).exists())


def test_a_fork_at_the_wrong_moment_stops_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen waits for its pipe to be closed, and a child forked while the pipe is open keeps it open."""
    starting, forked = threading.Event(), threading.Event()
    spawn = subprocess._fork_exec  # type: ignore[attr-defined]

    def slowly(*arguments: object) -> int:
        starting.set()
        forked.wait(0.5)  # as long as anybody may fork; where nobody may, the fork comes later
        return spawn(*arguments)

    monkeypatch.setattr(subprocess, "_fork_exec", slowly)
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(embedded.start(root)), daemon=True)
    thread.start()
    assert starting.wait(180)
    with forked_child():
        forked.set()
        thread.join(180)
        assert not thread.is_alive()
    assert found


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(root: Path) -> None:
    """Ranks take turns in starting a daemon; a worker of one that had its turn holds the file of the lock open."""
    lock = root.parent / "turn.lock"
    taken = threading.Event()

    def take() -> None:
        with embedded._turn(lock):
            taken.set()

    with ExitStack() as living:
        with embedded._turn(lock):
            living.enter_context(forked_child())
        threading.Thread(target=take, daemon=True).start()
        assert taken.wait(180)
    embedded.start(root)


def test_a_process_that_is_stopped_while_it_starts_a_daemon_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its turn; the others are told which file it holds."""
    monkeypatch.setattr(embedded, "TURN_TIMEOUT_S", 0.1)
    lock = tmp_path / "turn.lock"
    waits = threading.Thread(target=lambda: told.append(_refusal(lock)), daemon=True)
    told: list[str] = []
    with embedded._turn(lock):
        waits.start()
        waits.join(WAIT_TIMEOUT_S)
    assert told and str(lock) in told[0]


def _refusal(lock: Path) -> str:
    with pytest.raises(DaemonGone) as refused, embedded._turn(lock):
        pass
    return str(refused.value)


@pytest.mark.parametrize("free", [0, 2**30])
def test_a_daemon_that_does_not_start_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Its log, on the same disk, may lack the reason."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(DaemonGone if free else NoSpace, match="exited with status 1") as refused:
        embedded.start(tmp_path / "root")
    assert ("free space" in refused.value.hint) == ("is full" in refused.value.detail) == (free == 0)
    assert "its log is" in refused.value.hint


def test_a_disk_that_is_full_before_the_daemon_is_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory can be made there; one that may not be made is no full disk."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for number, kind in ((errno.ENOSPC, NoSpace), (errno.EACCES, DaemonGone)):

        def refuse(path: Path, *given: object, number: int = number, **named: object) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(kind, match=os.strerror(number)):
            embedded.start(tmp_path / "root")
