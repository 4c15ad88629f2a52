"""Who may speak at a unix socket: this user, root, and a group's members, whatever modes say. And where it may stand."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.link import connect as place
from holdfast_formats.errors import Forbidden, InvalidRequest
from holdfast_formats.staging import wire
from holdfast_service.daemon.arena import fd_keeper, holder
from holdfast_service.daemon.arena.callers import Caller, Callers, listen, prepare_directory
from holdfast_service.daemon.arena.fd_keeper import HolderProcess
from tests.daemons import RunningDaemon, running

NOBODY, GROUP = 65_534, 12  # a user that has nothing here, and a group of most systems: man
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")

_STRANGER = """
import os, socket, sys
os.setgroups(eval(sys.argv[2])); os.setgid(65534); os.setuid(65534)
made = socket.socket(socket.AF_UNIX, getattr(socket, sys.argv[3]))
made.settimeout(180)
made.connect(sys.argv[1])
try:
    made.send(bytes.fromhex(sys.argv[4]))
    while part := made.recv(65536):
        os.write(1, part)
except ConnectionError:
    pass  # hung up on
"""


@pytest.fixture
def place_() -> Iterator[Path]:
    """A directory that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def stranger(path: Path, message: bytes, groups: tuple[int, ...] = (), kind: str = "SOCK_STREAM") -> bytes:
    """What somebody else hears there who says this."""
    command = [sys.executable, "-I", "-c", _STRANGER, str(path), repr(list(groups)), kind, message.hex()]
    done = subprocess.run(command, capture_output=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


HELLO = wire.encode_frame(wire.Hello(id=7, run="r", rank=0, world=1, launch="x"))


def answer(daemon: RunningDaemon, groups: tuple[int, ...] = ()) -> wire.Message:
    (found,) = list(wire.FrameDecoder(wire.TO_RANK).feed(stranger(daemon.socket, HELLO, groups)))
    return found


@contextmanager
def open_to_all(place: Path, *flags: str) -> Iterator[RunningDaemon]:
    """A daemon whose socket has the wrong mode."""
    with running(place / "root", *flags) as daemon:
        daemon.socket.chmod(0o666)
        yield daemon


@needs_root
def test_another_user_is_refused_by_name(place_: Path) -> None:
    """Even where the file lets it connect: it hears why, and is hung up on. The daemon's own user is served as before."""
    with open_to_all(place_) as daemon:
        refused = answer(daemon)
        assert isinstance(refused, wire.Failed) and refused.reply_to == 7
        assert refused.problem["code"] == "forbidden" and "--socket-group" in refused.problem["hint"]
        assert "65534" in daemon.log.read_text()
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(str(daemon.socket))
            ours.sendall(HELLO)
            assert isinstance(next(iter(wire.FrameDecoder(wire.TO_RANK).feed(ours.recv(65_536)))), wire.Welcome)


@needs_root
def test_a_group_is_let_in(place_: Path) -> None:
    """With --socket-group its members come in, by their further groups as well, and others do not."""
    import grp

    name = grp.getgrgid(GROUP).gr_name
    with running(place_ / "root", "--socket-group", name) as daemon:
        found = daemon.socket.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, GROUP)
        command = [sys.executable, "-I", "-c", _STRANGER, str(daemon.socket), repr([GROUP]), "SOCK_STREAM", HELLO.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as member:
            assert member.stdout is not None
            heard = wire.FrameDecoder(wire.TO_RANK).feed(os.read(member.stdout.fileno(), 65_536))
            assert isinstance(next(iter(heard)), wire.Welcome)
            member.send_signal(signal.SIGTERM)
        daemon.socket.chmod(0o666)
        assert isinstance(answer(daemon), wire.Failed)


def test_a_group_that_there_is_not() -> None:
    """It is told before anything is bound."""
    with pytest.raises(InvalidRequest, match="the group 'nobody-at-all' does not exist"):
        Callers.of_group("nobody-at-all")


def test_whom_the_kernel_says_it_is() -> None:
    """The other end of a pair is this process, with all its groups."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found = Caller.of(one)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert found.gids == {os.getegid(), *os.getgroups()}


@pytest.mark.parametrize(
    ("uid", "gids", "gid", "allowed"),
    [
        (os.geteuid(), (), None, True),
        (0, (), None, True),
        (NOBODY, (), None, False),
        (NOBODY, (0,), None, False),
        (NOBODY, (5, 7), 7, True),
        (NOBODY, (5,), 7, False),
    ],
)
def test_who_is_let_in(uid: int, gids: tuple[int, ...], gid: int | None, allowed: bool) -> None:
    """Our user, root, and members of the one group."""
    callers, caller = Callers(gid), Caller(1, uid, frozenset(gids))
    if allowed:
        callers.check(caller)
        return
    with pytest.raises(Forbidden) as refused:
        callers.check(caller)
    assert refused.value.hint


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_sockets_are_private_without_a_umask_of_their_own(umask: int, place_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread writes a save meanwhile: with a umask for sockets it made directories that it could not enter."""
    before, path = os.umask(umask), place_ / "s" / "x.sock"
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is changed"))
        with listen(path, Callers()), fd_keeper.opened(path.with_suffix(".holder")):
            assert [stat.S_IMODE(made.stat().st_mode) for made in path.parent.iterdir()] == [0o600, 0o600]
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_a_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    """0700 where we make it; one that is there is left as it is."""
    assert prepare_directory(tmp_path / "new" / "s.sock")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert not prepare_directory(tmp_path / "new" / "s.sock")


def test_a_directory_in_which_others_may_replace_files(tmp_path: Path) -> None:
    """World-writable is refused by name, but with the sticky bit, as /tmp has it."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InvalidRequest, match="is writable by every user") as refused:
        prepare_directory(tmp_path / "open" / "s.sock")
    assert "--socket" in refused.value.hint
    (tmp_path / "open").chmod(0o1777)
    prepare_directory(tmp_path / "open" / "s.sock")


def test_a_socket_whose_path_is_too_long(tmp_path: Path) -> None:
    """It is refused by name before anything is made; 100 bytes are taken."""
    path = tmp_path / ("d" * (100 - len(str(tmp_path)) - 3)) / "s"
    with pytest.raises(InvalidRequest, match="too long for a unix socket") as refused:
        listen(path.with_name("ss"), Callers())
    assert "at most 100 bytes" in refused.value.hint and not path.parent.exists()
    listen(path, Callers()).close()


@needs_root
@pytest.mark.usefixtures("forked_programs")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    """A daemon does not start in it, and a client does not look for one there of its own accord."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    command = [sys.executable, "-m", "holdfast_service", "--root", str(tmp_path / "root"), "--listen", "none"]
    done = subprocess.run(
        [*command, "--socket", str(theirs / "s.sock")], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 2 and "belongs to user 65534" in done.stderr
    assert not (theirs / "s.sock").exists()
    (tmp_path / "ours").mkdir()
    assert place._ours(theirs / "s.sock") is None and place._ours(tmp_path / "none" / "s.sock") is None
    assert place._ours(tmp_path / "ours" / "s.sock") == tmp_path / "ours" / "s.sock"


@needs_root
def test_the_holder_gives_memory_to_nobody_else(place_: Path) -> None:
    """It hangs up on another user, and goes on for its own."""
    keeper = HolderProcess(place_ / "h" / "x.holder")
    fd = os.memfd_create("test")
    keeper.keep("a", fd)
    (place_ / "h").chmod(0o755)
    (place_ / "h" / "x.holder").chmod(0o666)
    assert stranger(place_ / "h" / "x.holder", b"list", kind="SOCK_SEQPACKET") == b""
    ours = HolderProcess(place_ / "h" / "x.holder")
    ((name, held),) = ours.take()
    assert name == "a"
    for each in (held, fd):
        os.close(each)
    keeper.drop("a")
    for each in (ours, keeper):
        each.close()


@needs_root
def test_a_holder_of_somebody_else_is_not_believed(place_: Path) -> None:
    """Who took its place hands us nothing."""
    path = place_ / "x.holder"
    script = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1]);"
        "os.setuid(65534); s.listen(1); print(flush=True); s.accept()[0].recv(1)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as impostor:
        assert impostor.stdout is not None and impostor.stdout.readline()
        with pytest.raises(PermissionError, match="belongs to another user"):
            fd_keeper._connected(path)
        impostor.wait(180)


def test_the_holder_says_the_same() -> None:
    """It imports nothing of ours, so its check is told twice; both are about the same structure."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert holder.is_ours(one) and Caller.of(one).uid == os.geteuid()


@pytest.mark.parametrize(("mode", "told"), [(0o700, True), (0o750, False), (0o710, True), (0o705, False)])
def test_a_group_that_may_save_and_not_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, told: bool
) -> None:
    """A root that is made is its user's alone: the log has the two commands that open it to the group."""
    root, name = tmp_path / "root", grp.getgrgid(os.getegid()).gr_name
    root.mkdir()
    root.chmod(mode)
    Callers.of_group(name).warn_if_closed(root)
    assert (f"chgrp {name} {root}; chmod 750 {root}" in caplog.text) is told
    caplog.clear()
    Callers().warn_if_closed(root)
    assert caplog.text == ""
