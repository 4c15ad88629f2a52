"""holder and keeping: descriptors outlive their daemon, in a process of their own or with the service manager."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SlotHeader, SlotState
from holdfast_service.config import fd_store
from holdfast_service.daemon.arena import holder
from holdfast_service.daemon.arena.fd_keeper import DescriptorKeeper, FdStore, HolderProcess
from tests.daemon.memory_keeper import MemoryKeeper
from tests.daemons import wait_until


def memory(content: bytes) -> int:
    """Shared memory with something in it."""
    fd = os.memfd_create("test")
    os.pwrite(fd, content, 0)
    return fd


def holders(path: Path) -> list[int]:
    """The processes that hold at a socket."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and bytes(path) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A place for a holder's socket; afterwards no holder is left. One that is not needed would end, but seconds later."""
    path = tmp_path / "h" / "x.holder"
    yield path
    for pid in holders(path):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: holders(path) == [])


def empty(keeper: DescriptorKeeper) -> None:
    """Drop everything and part."""
    for name, fd in keeper.take():
        os.close(fd)
        keeper.drop(name)
    keeper.close()


def test_what_one_daemon_gives_the_next_one_gets(path: Path) -> None:
    """Names and memory come back, also to a keeper that knows nothing; what was dropped does not."""
    first = HolderProcess(path)
    assert first.take() == [] and not path.exists(), "looking starts no process"
    for name in ("a", "b", "c"):
        fd = memory(name.encode() * 3)
        first.keep(name, fd)
        os.close(fd)
    first.drop("b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.close()
    second = HolderProcess(path)
    taken = dict(second.take())
    assert {name: os.pread(fd, 10, 0) for name, fd in taken.items()} == {"a": b"aaa", "c": b"ccc"}
    assert not any(os.get_inheritable(fd) for fd in taken.values())
    for fd in taken.values():
        os.close(fd)
    empty(second)


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    """As with the runtime directory of a job, and a node's whole host name: the first save must not fail of it."""
    path = tmp_path / ("d" * 100) / f"0123456789ab-{'n' * 63}.holder"
    first, fd = HolderProcess(path), memory(b"kept")
    first.keep("a", fd)
    assert path.is_socket()
    os.close(fd)
    first.close()
    second = HolderProcess(path)
    ((name, taken),) = second.take()
    assert (name, os.pread(taken, 10, 0)) == ("a", b"kept")
    os.close(taken)
    second.drop(name)
    second.close()
    wait_until(lambda: holders(path) == [])


def test_the_holder_ends_when_it_is_not_needed(path: Path) -> None:
    """With nothing held it stays while a daemon is connected, and goes some seconds after."""
    keeper = HolderProcess(path)
    fd = memory(b"x")
    keeper.keep("a", fd)
    keeper.drop("a")
    assert len(holders(path)) == 1
    keeper.close()
    wait_until(lambda: holders(path) == [] and not path.exists())
    keeper.keep("a", fd)
    os.close(fd)
    empty(keeper)


def test_a_holder_that_was_killed_is_replaced(path: Path) -> None:
    """The next descriptor starts another one, which is given everything that is still kept."""
    keeper = HolderProcess(path)
    one, two = memory(b"one"), memory(b"two")
    keeper.keep("one", one)
    (pid,) = holders(path)
    os.kill(pid, signal.SIGKILL)
    keeper.keep("two", two)
    keeper.close()
    later = HolderProcess(path)
    taken = dict(later.take())
    assert {name: os.pread(fd, 10, 0) for name, fd in taken.items()} == {"one": b"one", "two": b"two"}
    for fd in (one, two, *taken.values()):
        os.close(fd)
    empty(later)


@pytest.mark.parametrize("request_", [b"keep a", b"drop nothing", b"keep", b"nonsense", b"\xff\xfe", b"x" * 600])
def test_a_holder_refuses_what_it_does_not_know(path: Path, request_: bytes) -> None:
    """A name that is taken, one that is not there, and noise are answered with one word, and harm nothing."""
    keeper = HolderProcess(path)
    fd = memory(b"a")
    keeper.keep("a", fd)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(path))
        socket.send_fds(other, [request_], [fd])
        assert other.recv(100) == b"refused"
    with pytest.raises(ConnectionError):
        keeper.drop("nothing")
    os.close(fd)
    assert [(name, os.close(kept)) for name, kept in keeper.take()] == [("a", None)]
    empty(keeper)


def test_the_holder_needs_nothing_but_the_standard_library() -> None:
    """It runs isolated, without site packages, and so starts in a blink."""
    command = [sys.executable, "-I", "-S", holder.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--listener" in done.stdout


@pytest.mark.parametrize("slot", [None, 0, 2])
def test_a_holder_knows_what_is_sealed(slot: int | None) -> None:
    """It reads a segment as the arena's format says, and takes noise and empty memory for nothing."""
    geometry = arena.geometry(3, 5000, 9000)
    made = bytearray(geometry.segment_bytes)
    view = memoryview(made)
    arena.write_superblock(view, geometry)
    for index in range(3):
        arena.write_header(view, geometry, index, SlotHeader(SlotState.LEASED, 1, 1, 0, 0, 0))
    if slot is not None:
        arena.set_state(view, geometry, slot, SlotState.SEALED)
    for content, sealed in ((bytes(made), slot is not None), (b"", False), (b"x" * 100, False), (b"\xff" * 9000, False)):
        fd = memory(content)
        assert holder.holds_sealed(fd) == sealed
        os.close(fd)


def test_a_holder_left_alone_keeps_only_what_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no daemon for long, memory in which nothing is sealed goes back to the machine, and the holder ends with it."""
    monkeypatch.setattr(holder, "ALONE_S", 0.0)
    monkeypatch.setattr(holder, "LINGER_S", 0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        alone = holder.Holder(listener)
        fd = memory(b"")
        assert alone._answer(listener, ["keep", "a"], [os.dup(fd)]) == b"done"
        monkeypatch.setattr(holder, "LINGER_S", 0.001)
        alone.serve()
        assert alone._answer(listener, ["drop", "a"], []) == b"refused"
        os.close(fd)


def test_the_service_manager_keeps_descriptors_too(tmp_path: Path) -> None:
    """FDSTORE messages of sd_notify, with the descriptor; FDSTOREREMOVE to drop it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        store = FdStore(str(tmp_path / "notify"), ())
        fd = memory(b"kept")
        store.keep("name", fd)
        os.close(fd)
        message, (stored,), _, _ = socket.recv_fds(manager, 1000, 4)
        assert message == b"FDSTORE=1\nFDNAME=name" and os.pread(stored, 10, 0) == b"kept"
        store.drop("name")
        assert manager.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=name"
        os.set_inheritable(stored, True)
        next_start = FdStore(str(tmp_path / "notify"), [("name", stored)])
        assert next_start.take() == [("name", stored)] and not os.get_inheritable(stored)
        assert next_start.take() == []
        os.close(stored)


def test_the_abstract_address_of_a_service_manager() -> None:
    """A leading @ stands for the abstract namespace."""
    name = f"holdfast-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        FdStore("@" + name, ()).drop("x")
        assert manager.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=x"


def test_the_environment_tells_of_an_fd_store() -> None:
    """Only a service that has room in it uses it, and only descriptors that were meant for this very process."""
    service = {"NOTIFY_SOCKET": "/run/n", "FDSTORE": "64"}
    passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert fd_store({}) is None
    assert fd_store({"NOTIFY_SOCKET": "/run/n"}) is None and fd_store({**service, "FDSTORE": "0"}) is None
    assert fd_store(service) == ("/run/n", ())
    assert fd_store({**service, **passed}) == ("/run/n", (("a", 3), ("b", 4)))
    assert fd_store({**service, **passed, "LISTEN_PID": "1"}) == ("/run/n", ())


def test_the_keeper_in_memory_keeps_what_it_was_given() -> None:
    """The seam's fake behaves as the others do."""
    keeper = MemoryKeeper()
    fd = memory(b"x")
    keeper.keep("a", fd)
    os.close(fd)
    ((name, taken),) = keeper.take()
    assert name == "a" and os.pread(taken, 1, 0) == b"x"
    os.close(taken)
    empty(keeper)
    assert keeper.take() == []
