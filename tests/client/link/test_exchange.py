"""The first steps of a conversation with a daemon."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.link import connect as links
from holdfast.link import exchange
from holdfast.link.address import place
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone
from holdfast_formats.root_files import DaemonFile, RootFile, RootMark, encode

NOBODY = 65_534  # a user that has nothing here


def test_a_socket_is_reached_under_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be bound by a shorter one, from its directory; the absolute path is more than connect(2) takes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen()
        monkeypatch.chdir("/")
        before = len(os.listdir("/proc/self/fd"))
        exchange.connect(deep / "s").close()
        assert len(os.listdir("/proc/self/fd")) == before
    for missing in (deep / "t", deep / "f" / "s"):
        with pytest.raises(DaemonGone, match="no daemon answers"):
            exchange.connect(missing)


@contextmanager
def another_user() -> Iterator[int]:
    """Within the block this process is not root: the kernel lets root in everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", ["socket", "directory"])
def test_a_user_that_may_not_use_the_socket_is_told_so(closed: str) -> None:
    """A daemon serves there, so another one is not asked for: the user, the owner and the option that lets a group in are
    named. A sign of life is refused in the same words.
    """
    with tempfile.TemporaryDirectory(prefix="hf-") as made, socket.socket(socket.AF_UNIX) as listener:
        inner = Path(made) / "run"
        inner.mkdir()
        Path(made).chmod(0o755)
        path = inner / "s.sock"
        listener.bind(str(path))
        listener.listen()
        shut = path if closed == "socket" else inner
        shut.chmod(0)
        with another_user() as uid:
            for ask in (exchange.connect, lambda path: exchange.ping(path, 1.0)):
                with pytest.raises(DaemonGone, match=f"user {uid} may not use the daemon at {path}") as refused:
                    ask(path)
                said = refused.value
                assert (
                    f"the {closed} {shut} belongs to user {os.getuid()} and group" in said.detail and "0000" in said.detail
                )
                assert "--socket-group" in str(said.hint) and "holdfast serve" not in str(said.hint)
        shut.chmod(0o700)


def test_a_root_whose_daemon_is_closed_to_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its directory is given, and none can be started there for that user: why, and not that none was started."""
    with tempfile.TemporaryDirectory(prefix="hf-") as made, socket.socket(socket.AF_UNIX) as listener:
        root, path = Path(made) / "root", Path(made) / "s.sock"
        root.mkdir()
        Path(made).chmod(0o755)
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        at = root.stat()
        mark = RootMark(id="an-id", device=at.st_dev, inode=at.st_ino)
        (root / naming.ROOT_FILE).write_bytes(encode(RootFile(id="an-id", inode=at.st_ino)))
        (root / naming.DAEMON_FILE).write_bytes(encode(DaemonFile(pid=os.getpid(), socket=str(path), root=mark)))
        for file in root.iterdir():
            file.chmod(0o644)
        root.chmod(0o555)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
        link_events = (lambda outcome: None, lambda error: None)
        with another_user() as uid:
            for start in (True, False):
                with pytest.raises(DaemonGone, match=re.escape(f"user {uid} may not use the daemon at {path}")):
                    links.connect(place(root), "r", start, link_events, lambda link, meant: pytest.fail("it was let in"))
        root.chmod(0o755)
