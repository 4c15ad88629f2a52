"""holder and keeping: descriptors outlive their daemon, in a process of their own or with the service manager."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner, SlotHeader, SlotState
from holdfast_service.config import fd_store
from holdfast_service.daemon.arena import holder
from holdfast_service.daemon.arena.fd_keeper import DescriptorKeeper, FdStore, HolderProcess, lost_saves
from holdfast_service.daemon.arena.holder import SealedSave
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "--listener" in done.stdout


@pytest.mark.parametrize("slot", [None, 0, 2])
def test_a_holder_knows_what_is_sealed(slot: int | None) -> None:
    """It reads a segment as the arena's format says, and takes noise and empty memory for nothing."""
    geometry = arena.geometry(3, 5000, 9000)
    made = bytearray(geometry.segment_bytes)
    view = memoryview(made)
    arena.write_superblock(view, geometry, SegmentOwner("run", 2, 3, 1))
    for index in range(3):
        arena.write_header(view, geometry, index, SlotHeader(SlotState.LEASED, 1, 1, 0, 0, 0))
    if slot is not None:
        arena.set_state(view, geometry, slot, SlotState.SEALED)
    for content, sealed in ((bytes(made), slot is not None), (b"", False), (b"x" * 100, False), (b"\xff" * 9000, False)):
        fd = memory(content)
        assert holder.sealed_saves(fd) == ([SealedSave("run", 1, 2, 3)] if sealed else [])
        os.close(fd)


def sealed_segment() -> int:
    """Shared memory in which step 5 of run r is sealed."""
    geometry = arena.geometry(1, 8, 8)
    fd = os.memfd_create("test")
    os.ftruncate(fd, geometry.segment_bytes)
    with mmap.mmap(fd, geometry.segment_bytes) as mapped, memoryview(mapped) as view:
        arena.write_superblock(view, geometry, SegmentOwner("r", 0, 1, 1))
        arena.write_header(view, geometry, 0, SlotHeader(SlotState.SEALED, 5, 1, 0, 0, 0))
    return fd


class Alone:
    """A holder that no daemon is connected to, with a segment in which step 5 of run r is sealed, and the root it is of."""

    def __init__(self, at: Path, root_id: str = "id") -> None:
        self.at, self.root, self.path, self.started = at, at / "root", at / "x.holder", at / "started"
        self.root.mkdir()
        (self.root / naming.ROOT_FILE).write_text(f'{{"id": "{root_id}"}}')
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.holder = holder.Holder(self.listener, self.path)
        code = "import os, sys; os.mkdir(sys.argv[1]); print(sys.argv[2:], os.environ['WHO'], os.getcwd(), flush=True)"
        command = [sys.executable, "-c", code, str(self.started)]
        start = holder.Start(command, str(at), {"WHO": "me"}, str(self.root), "id")
        self.fd = sealed_segment()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
            assert self.holder._answer(daemon, f"serve {json.dumps(start._asdict())}", []) == b"done"
            assert self.holder._answer(daemon, "keep a", [os.dup(self.fd)]) == b"done"
            self.holder._daemons.clear()

    def serve(self) -> None:
        """In a thread, so that the test can look meanwhile; it ends when the holder lets go."""
        self.thread = threading.Thread(target=self.holder.serve)
        self.thread.start()

    @property
    def about(self) -> dict[str, Any]:
        told: dict[str, Any] = self.holder._about()
        return told

    def close(self) -> None:
        self.listener.close()
        self.holder._selector.close()
        os.close(self.fd)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Holders that lose patience at once, and start no second daemon."""
    for name, value in {"ALONE_S": 0.0, "LINGER_S": 0.1, "CHECK_S": 0.02, "RETRY_S": 1e6, "RETRY_S_MAX": 1e6}.items():
        monkeypatch.setattr(holder, name, value)
    return monkeypatch


def test_a_holder_left_alone_keeps_only_what_is_sealed(quick: pytest.MonkeyPatch, alone: Alone) -> None:
    """With no daemon for long, memory in which nothing is sealed goes back to the machine, and the holder ends with it."""
    os.pwrite(alone.fd, b"\0", arena.PAGE_BYTES + 12)  # free
    alone.serve()
    alone.thread.join(180)
    assert alone.about["segments"] == 0 and not alone.started.exists() and not alone.path.with_suffix(".lost").exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_holder_left_alone_starts_a_daemon_for_what_is_sealed(quick: pytest.MonkeyPatch, alone: Alone) -> None:
    """The command that the last daemon gave, where and with what that had, once; what it says goes into a file. If that
    daemon does not take over, the memory stays for a while, and then goes, which is written down.
    """
    alone.serve()
    log = alone.at / "x.log"
    wait_until(lambda: log.exists() and log.read_text() == f"[] me {alone.at}\n")
    wait_until(lambda: alone.about["alone_s"] is not None)
    told = alone.about
    assert (told["segments"], told["saves"], told["root"]) == (1, ["r@5"], str(alone.root)) and told["bytes"] > 0
    assert lost_saves(alone.path) == []
    quick.setattr(holder, "GIVE_UP_S", 0.0)
    alone.thread.join(180)
    (record,) = lost_saves(alone.path)
    assert record["saves"] == [{"run": "r", "step": 5, "rank": 0, "world": 1}] and "no daemon" in record["why"]
    assert alone.about["segments"] == 0 and lost_saves(alone.path) == [], "it is told once"


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "not-mounted"])
def test_a_holder_starts_no_daemon_for_a_root_that_is_not_there(quick: pytest.MonkeyPatch, alone: Alone, gone: bool) -> None:
    """A daemon would make another root of an empty directory. What is gone for good is let go of soon, and a directory on
    which the disk is not mounted yet is waited for.
    """
    quick.setattr(holder, "GONE_S", 0.0)
    shutil.rmtree(alone.root)
    if not gone:
        alone.root.mkdir()
    alone.serve()
    if not gone:
        time.sleep(0.3)
        assert alone.thread.is_alive() and alone.about["segments"] == 1 and not alone.started.exists()
        alone.root.rmdir()
    alone.thread.join(180)
    (record,) = lost_saves(alone.path)
    assert record["why"] == f"its root {alone.root} is gone" and not alone.started.exists()


def supervise(path: Path, code: str, *arguments: object, watched: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A holder above a daemon, which is this Python code; `watched`: the holder's flags of a watchdog."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        number = listener.fileno()
        words = [sys.executable, "-I", "-S", holder.__file__, "--socket", str(path), "--listener", str(number)]
        command = [*words, *watched, "--supervise", sys.executable, "-c", code, *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pass_fds=[number])


def test_a_daemon_below_the_holder_is_started_again_when_it_is_killed(path: Path) -> None:
    """It is the first process of a container: the memory outlives the daemon, whose own exit status it ends with."""
    code = (
        "import os, signal, time; signal.signal(15, lambda *_: os._exit(7)); print(os.getpid(), flush=True); time.sleep(600)"
    )
    above = supervise(path, code)
    assert above.stdout is not None and above.stderr is not None
    first = int(above.stdout.readline())
    keeper, fd = HolderProcess(path), memory(b"kept")
    keeper.keep("a", fd)
    os.close(fd)
    keeper.close()
    os.kill(first, signal.SIGKILL)
    second = int(above.stdout.readline())
    assert "ended with status 137 and restarts" in above.stderr.readline()
    later = HolderProcess(path)
    ((name, taken),) = later.take()
    later.close()
    assert (name, os.pread(taken, 10, 0)) == ("a", b"kept") and second != first
    os.close(taken)
    above.terminate()
    assert above.wait(180) == 7 and not path.exists()
    above.communicate()


def test_a_signal_that_comes_before_the_daemon_is_started_again_ends_the_holder(path: Path) -> None:
    """A container is stopped in that second: no daemon is started that would not hear of it."""
    above = supervise(path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert above.stdout is not None and above.stderr is not None
    os.kill(int(above.stdout.readline()), signal.SIGKILL)
    assert "restarts in" in above.stderr.readline()
    above.terminate()
    assert above.communicate(timeout=180) == ("", "") and above.returncode == 137


READY = "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(sys.argv[1]); "
TALKS = "[(s.send(b'WATCHDOG=1'), time.sleep(0.1)) for _ in range({})]"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_silent_daemon_below_the_holder_is_killed_and_started_again(path: Path, stopped: bool) -> None:
    """It hangs, or was stopped (SIGSTOP): nothing else would end it, and its container stayed unhealthy for ever."""
    notify = path.with_name("notify")
    code = (
        READY
        + "s.send(b'READY=1'); print(os.getpid(), flush=True); "
        + (TALKS.format(6000) if stopped else "time.sleep(600)")
    )
    above = supervise(path, code, notify, watched=("--notify", str(notify), "--silent", "2"))
    assert above.stdout is not None and above.stderr is not None
    first = int(above.stdout.readline())
    if stopped:
        os.kill(first, signal.SIGSTOP)
    assert "has been silent for 2 s and is killed; staged saves are kept" in above.stderr.readline()
    assert "restarts in" in above.stderr.readline()
    assert int(above.stdout.readline()) != first
    above.terminate()
    above.communicate(timeout=180)
    assert not notify.exists()


def test_a_daemon_that_starts_stops_or_was_stopped_with_its_holder_is_not_silent(path: Path) -> None:
    """Before READY=1, after STOPPING=1, and while the whole container was paused, no sign of life is expected."""
    notify = path.with_name("notify")
    code = READY + f"time.sleep(3); s.send(b'READY=1'); print(os.getpid(), flush=True); {TALKS.format(80)}; "
    code += "print('paused', flush=True); sys.stdin.readline(); s.send(b'STOPPING=1'); time.sleep(3); print('stopped')"
    above = supervise(path, code, notify, watched=("--notify", str(notify), "--silent", "2"))
    assert above.stdout is not None and above.stderr is not None
    below = int(above.stdout.readline())
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(above.pid, number)
        os.kill(below, number)
        time.sleep(3 if number == signal.SIGSTOP else 0)
    said, errors = above.communicate(timeout=180)
    assert said == "paused\nstopped\n" and errors == "" and above.returncode == 0


def sealed(path: Path) -> None:
    """Give the holder a segment in which step 5 of run r is sealed."""
    keeper, fd = HolderProcess(path), sealed_segment()
    keeper.keep("a", fd)
    os.close(fd)
    keeper.close()


# A daemon that is ready. Its first life (there is no file `first`) does what a test wants; every later one writes what is
# sealed when it is told to stop, as far as its holder can know.
LIVES = (
    READY
    + """
import pathlib, signal
sys.path.insert(0, sys.argv[2])
lives = pathlib.Path(sys.argv[3]); life = len(list(lives.iterdir())); (lives / str(life)).write_text(str(os.getpid()))
stopped = []
signal.signal(15, lambda *_: stopped.append(1))
"""
)
WRITES = """
from holdfast_service.daemon.arena.fd_keeper import HolderProcess
def write():
    keeper = HolderProcess(pathlib.Path(sys.argv[4]))
    for name, fd in keeper.take():
        keeper.drop(name)
    keeper.close()
def until_stopped():
    s.send(b'READY=1')
    print(life, 'ready', flush=True)
    while not stopped:
        time.sleep(0.05)
    s.send(b'STOPPING=1')
    write()
    print(life, 'wrote', flush=True)
"""


class Lives:
    """A holder above a daemon whose lives are this code."""

    def __init__(self, path: Path, code: str, silent_s: float = 600.0) -> None:
        notify, lives = path.with_name("notify"), path.with_name("lives")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lives.mkdir()
        service = Path(holder.__file__).parents[3]
        flags = ("--notify", str(notify), "--silent", str(silent_s))
        self.above = supervise(path, LIVES + WRITES + code, notify, service, lives, path, watched=flags)
        self.path = path

    def says(self) -> str:
        assert self.above.stdout is not None
        return self.above.stdout.readline().strip()

    def stop(self) -> tuple[str, str]:
        """What it says from SIGTERM on, and its errors."""
        self.above.terminate()
        return self.above.communicate(timeout=180)


def test_a_stopped_daemon_is_continued_to_write_what_is_staged(path: Path) -> None:
    """`docker stop` after SIGSTOP: the daemon could not hear the signal, and the saves would go with the container."""
    lives = Lives(path, "until_stopped()")
    assert lives.says() == "0 ready"
    sealed(path)
    os.kill(int((path.with_name("lives") / "0").read_text()), signal.SIGSTOP)
    assert lives.stop() == ("0 wrote\n", "") and lives.above.returncode == 0
    assert lost_saves(path) == []


def test_a_daemon_that_hangs_when_it_shall_stop_is_replaced_by_one_that_writes(path: Path) -> None:
    lives = Lives(path, "if life: until_stopped()\nelse: s.send(b'READY=1'); print('hangs', flush=True); time.sleep(600)")
    assert lives.says() == "hangs"
    sealed(path)
    said, errors = lives.stop()
    assert said == "1 ready\n1 wrote\n" and lives.above.returncode == 0
    assert "has been silent for 4 s and is killed; staged saves are kept" in errors
    assert "and another one writes what is staged" in errors and "1 staged saves r@5" in errors
    assert lost_saves(path) == []


def test_a_daemon_that_takes_over_is_told_to_stop_once_it_is_ready(path: Path) -> None:
    """The signal comes while it starts, when it would just end: with it the saves that it has not taken over yet."""
    code = "print(life, flush=True)\nif life: sys.stdin.readline(); until_stopped()\nelse: time.sleep(600)"
    lives = Lives(path, code)
    assert lives.says() == "0"
    sealed(path)
    os.kill(int((path.with_name("lives") / "0").read_text()), signal.SIGKILL)
    assert lives.says() == "1"
    lives.above.terminate()
    time.sleep(1)  # long enough to be told too early
    assert lives.above.stdin is not None
    said, _ = lives.above.communicate("go\n", timeout=180)
    assert said == "1 ready\n1 wrote\n" and lives.above.returncode == 0


def test_saves_that_no_daemon_writes_at_a_stop_are_told(path: Path) -> None:
    """Every daemon is killed: the holder ends all the same, and tells the log and the next daemon what goes with it."""
    lives = Lives(
        path, "s.send(b'READY=1'); print(life, flush=True)\nwhile not stopped: time.sleep(0.05)\nos.kill(os.getpid(), 9)"
    )
    assert lives.says() == "0"
    sealed(path)
    said, errors = lives.stop()
    assert said == "1\n2\n3\n" and lives.above.returncode == 137
    assert "1 staged saves r@5: its container was stopped before a daemon had written it" in errors
    (record,) = lost_saves(path)
    assert record["saves"] == [{"run": "r", "step": 5, "rank": 0, "world": 1}]


def test_what_the_daemon_says_is_passed_on_to_the_manager_of_the_holder(path: Path, tmp_path: Path) -> None:
    notify, outer = path.with_name("notify"), tmp_path / "outer"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(outer))
        manager.settimeout(180)
        flags = ("--notify", str(notify), "--above", str(outer))
        above = supervise(path, READY + "s.send(b'READY=1'); time.sleep(1)", notify, watched=flags)
        assert manager.recv(100) == b"READY=1"
        above.communicate(timeout=180)


FORKING = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import holder
child, fork = holder.Child(None), os.fork
def forked():
    pid = fork()
    if pid:
        os.kill(pid if sys.argv[2] == "daemon" else os.getpid(), signal.SIGTERM)
    return pid
os.fork = forked
signal.signal(signal.SIGTERM, lambda number, _: child.signal(number))
child.start(holder.Start([sys.executable, "-c", "import time; time.sleep(600)"], ".", None, "", ""))
while not child.ended():
    time.sleep(0.01)
print(child.status, child.killed)
"""


@pytest.mark.parametrize("to", ["holder", "daemon"])
def test_a_signal_between_the_fork_and_its_number_ends_the_daemon(to: str) -> None:
    """To the holder, which does not know the daemon's number yet, or to the daemon, which still has the holder's handlers:
    it is neither lost nor taken for one that came before.
    """
    command = [sys.executable, "-c", FORKING, str(Path(holder.__file__).parent), to]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.returncode) == ("143 True\n", 0), done.stderr


def test_a_daemon_below_the_holder_that_refuses_to_serve_ends_it(path: Path) -> None:
    """A flag is wrong, or the root is in use: the container ends, with that status, instead of trying for ever."""
    above = supervise(path, "import sys; sys.exit(4)")
    assert above.communicate(timeout=180) == ("", "") and above.returncode == 4


def test_the_service_manager_keeps_descriptors_too(tmp_path: Path) -> None:
    """FDSTORE messages of sd_notify, with the descriptor; FDSTOREREMOVE to drop it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(180)
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


class Manager:
    """A service manager that stores descriptors, or none, as systemd of any version: it closes what it does not store."""

    def __init__(self, path: Path, stores: bool, answers: bool = True) -> None:
        self.names: list[str] = []
        self._stores, self._answers, self._kept = stores, answers, list[int]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        while True:
            message, fds, _, _ = socket.recv_fds(self._socket, 1000, 4)
            if not message:
                return
            if message.startswith(b"FDSTORE=1") and self._stores:
                self.names.append(message.decode().partition("FDNAME=")[2])
                self._kept += fds
            elif message.startswith(b"FDSTOREREMOVE=1"):
                self.names = [name for name in self.names if name != message.decode().partition("FDNAME=")[2]]
            elif not self._answers:
                self._kept += fds
            else:
                for fd in fds:
                    os.close(fd)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(180)
        self._socket.close()
        for fd in self._kept:
            os.close(fd)


def test_a_store_that_keeps_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd before 254 does not say whether a unit has room in its fd store: it is tried, and nothing of that stays. A
    manager that does not answer, or is not there, has none.
    """
    monkeypatch.setattr("holdfast_service.daemon.arena.fd_keeper.ANSWER_TIMEOUT_S", 0.2)
    storing, closing = Manager(tmp_path / "a", True), Manager(tmp_path / "b", False)
    assert FdStore(str(tmp_path / "a"), ()).has_room() and not FdStore(str(tmp_path / "b"), ()).has_room()
    wait_until(lambda: storing.names == [] and closing.names == [])
    silent = Manager(tmp_path / "c", True, answers=False)
    assert not FdStore(str(tmp_path / "c"), ()).has_room() and not FdStore(str(tmp_path / "nobody"), ()).has_room()
    for manager in (storing, closing, silent):
        manager.close()
    watched, given = os.pipe()
    assert FdStore("/nowhere", [("holdfast-probe", given)]).take() == [], "a daemon was killed while it tried"
    os.close(watched)


def test_the_environment_tells_of_an_fd_store() -> None:
    """A service manager is asked unless it says that it keeps nothing; only descriptors meant for this process are taken."""
    service = {"NOTIFY_SOCKET": "/run/n", "FDSTORE": "64"}
    passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert fd_store({}) is None and fd_store({"FDSTORE": "64"}) is None
    assert fd_store({**service, "FDSTORE": "0"}) is None
    assert fd_store(service) == fd_store({"NOTIFY_SOCKET": "/run/n"}) == ("/run/n", ())
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
