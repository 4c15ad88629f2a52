"""The unix socket: what a stranger, a broken trainer or a second daemon gets to hear, and that it harms nobody."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.link.unix_socket import SocketLink
from holdfast.stage.slots import Slots
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, LimitExceeded
from holdfast_formats.staging import wire
from tests.daemons import RunningDaemon, wait_until
from tests.kit.daemons import own_daemon

# A daemon with a small budget of shared memory.
daemon = own_daemon("--arena-bytes-max", "1000000", "--spill", "never", listen="none")


def link(daemon: RunningDaemon) -> SocketLink:
    return SocketLink(daemon.socket, lambda outcome: None, lambda error: None)


def hello(link: SocketLink, **changes: object) -> wire.Welcome:
    message = wire.Hello(**{"id": link.next_id(), "run": "r", "rank": 0, "world": 1, "launch": "x", **changes})
    return link.request(message, wire.Welcome)


def test_descriptors_that_two_threads_ask_for_are_not_taken_for_each_others(daemon: RunningDaemon) -> None:
    """Memory for slots and for an average come to one rank: who asks waits until the other one has taken its own."""
    with_us, done = link(daemon), threading.Event()
    hello(with_us, run="two-threads")

    def reserve() -> None:
        Slots(with_us, 1, 100, 100)
        done.set()

    with with_us.receiving:
        asking = threading.Thread(target=reserve)
        asking.start()
        assert not done.wait(0.3)
    asking.join(180)
    assert done.is_set()
    with_us.close()


def test_a_stranger_is_asked_to_say_hello(daemon: RunningDaemon) -> None:
    """Any request before hello is refused by name, and the conversation goes on."""
    with_us = link(daemon)
    with pytest.raises(InvalidRequest, match="hello"):
        with_us.request(wire.Lease(id=with_us.next_id(), step=1), wire.Granted)
    assert hello(with_us).attempt >= 1
    with pytest.raises(InvalidRequest, match="reserve"):
        with_us.request(wire.Lease(id=with_us.next_id(), step=1), wire.Granted)
    with_us.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"protocol": 99}, "protocol 99"), ({"rank": 3, "world": 2}, "rank 3"), ({"run": "../etc"}, "run name")],
)
def test_an_impossible_hello_is_refused(daemon: RunningDaemon, changes: dict, message: str) -> None:
    """Another protocol, a rank outside its world, a run name that is a path: refused with a reason."""
    stranger = link(daemon)
    with pytest.raises(InvalidRequest, match=message):
        hello(stranger, **changes)
    stranger.close()


@pytest.mark.parametrize("garbage", [b"\x00" * 64, b"\xff" * 64, b"\x05\x00\x00\x00hello", b"\x02\x00\x00\x00{}"])
def test_garbage_ends_one_conversation_only(daemon: RunningDaemon, garbage: bytes) -> None:
    """Bytes that are no frames close the connection; the daemon goes on serving others."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(str(daemon.socket))
    raw.sendall(garbage)
    raw.settimeout(180)
    assert raw.recv(100) == b""
    raw.close()
    other = link(daemon)
    assert hello(other).node
    other.close()


def test_memory_over_the_budget_is_refused_with_the_numbers(daemon: RunningDaemon) -> None:
    """A segment that does not fit says how much was asked and how much there is; what fits is given, and given back."""
    greedy = link(daemon)
    hello(greedy)
    with pytest.raises(
        LimitExceeded,
        match=r"one slot, 2\d{6} for 2; 0 are reserved, and 960000 are left of --arena-bytes-max, 1000000 bytes",
    ):
        Slots(greedy, 2, 10**6, 0)
    for _ in range(5):
        Slots(greedy, 2, 200_000, 0)  # each replaces the one before
    greedy.close()


def test_a_rank_that_leaves_before_the_answer_is_no_failure(daemon: RunningDaemon) -> None:
    """It asks for memory and is gone when that is there: the log says so in a line, and not as an error of the daemon."""
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(str(daemon.socket))
        rank.sendall(wire.encode_frame(wire.Hello(id=1, run="hasty", rank=0, world=1, launch="x")))
        assert rank.recv(2**16)
        rank.shutdown(socket.SHUT_RD)
        rank.sendall(wire.encode_frame(wire.Reserve(id=2, slots=2, data_bytes=100_000, table_bytes=0)))
        assert not rank.recv(1)
    wait_until(lambda: "a rank's connection broke" in daemon.log.read_text())
    assert "Traceback" not in daemon.log.read_text()


def test_a_slot_that_was_not_leased_cannot_be_sealed(daemon: RunningDaemon) -> None:
    """Sealing without a lease is a named error and no save."""
    rogue = link(daemon)
    hello(rogue)
    Slots(rogue, 1, 100, 100)
    with pytest.raises(CheckpointError, match="no lease"):
        rogue.request(wire.Seal(id=rogue.next_id(), slot=0, step=1, table_digest="0" * 16), wire.Sealed)
    rogue.close()


def test_only_ones_own_segment_can_be_attached(daemon: RunningDaemon) -> None:
    """Without a descriptor, with one of something else, or with another rank's segment: refused by name."""
    with_us = link(daemon)
    hello(with_us, run="attach", world=2, launch="a")
    with pytest.raises(InvalidRequest, match="descriptor"):
        with_us.request(wire.Attach(id=with_us.next_id()), wire.Done)
    Slots(with_us, 1, 100, 100)
    other = link(daemon)
    hello(other, run="attach", rank=1, world=2, launch="a")
    noise = os.memfd_create("noise")
    os.ftruncate(noise, 10_000)
    for fd, message in ((noise, "not a staging arena"), (with_us._state.segment, "attached a segment of")):
        reply = other._ask(wire.Attach(id=other.next_id()), time.monotonic() + 180, (fd,))
        assert isinstance(reply, wire.Failed) and message in reply.problem["detail"]
    reply = with_us._ask(wire.Attach(id=with_us.next_id(), open=(3,)), time.monotonic() + 180, (with_us._state.segment,))
    assert isinstance(reply, wire.Done)
    os.close(noise)
    other.close()
    with_us.close()


def test_the_socket_is_the_users_own(daemon: RunningDaemon) -> None:
    """Nobody else on the machine may connect."""
    assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("same", ["root", "socket"])
def test_a_second_daemon_is_refused(daemon: RunningDaemon, tmp_path: Path, same: str) -> None:
    """On a root or a socket that is served already, the second one ends with a name and a hint, and harms nothing."""
    root = daemon.root if same == "root" else tmp_path / "other"
    path = daemon.socket if same == "socket" else tmp_path / "s.sock"
    command = [sys.executable, "-m", "holdfast_service", "--root", str(root), "--socket", str(path), "--listen", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 4 and "root-busy" in done.stderr and "hint" in done.stderr
    still = link(daemon)
    assert hello(still).attempt >= 1
    still.close()


_TELLS = """
import signal, sys
from pathlib import Path
from holdfast_service.__main__ import main

set_handler = signal.signal

def told(number, handler):
    if number == signal.SIGTERM:
        print("told already" if Path(sys.argv[1]).exists() else "not told yet", flush=True)
    return set_handler(number, handler)

signal.signal = told
sys.exit(main(sys.argv[2:]))
"""


_LOADED = """
import sys
from holdfast_service.__main__ import main

assert main(sys.argv[1:]) == 0
print(sorted({"fastapi", "httpx", "jinja2", "holdfast_service.wings.convert.jobs"} & sys.modules.keys()))
"""


def test_a_daemon_without_an_api_starts_without_its_modules(tmp_path: Path) -> None:
    """Ranks wait for the daemon that a trainer starts: FastAPI, pages and imports cost it half a second."""
    given = ["--root", str(tmp_path / "root"), "--socket", str(tmp_path / "s.sock"), "--listen", "none"]
    command = [sys.executable, "-c", _LOADED, *given, "--exit-when-idle", "0.1"]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout == "[]\n"


def test_who_knows_where_the_daemon_is_can_end_it(tmp_path: Path) -> None:
    """Before it says where it is it heeds SIGTERM: who sends one as soon as it knows has it end in order."""
    about = tmp_path / "root" / naming.DAEMON_FILE
    given = ["--root", str(tmp_path / "root"), "--socket", str(tmp_path / "s.sock"), "--listen", "none"]
    with subprocess.Popen([sys.executable, "-c", _TELLS, str(about), *given], stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None and daemon.stdout.readline() == "not told yet\n"
            wait_until(about.exists)
            daemon.terminate()
            assert daemon.wait(180) == 0
        finally:
            daemon.kill()
    assert not about.exists()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    "flags",
    [
        ["--listen", "nowhere"],
        ["--keep", "0"],
        ["--keep-full", "0"],
        ["--keep-optim", "int8"],
        ["--keep-optim", "int8", "--keep-optim-full", "3", "--keep-full", "3"],
        ["--log-level", "loud"],
        ["--node", "a/b"],
        ["--arena-bytes-max", "x"],
        ["--write-bytes-per-second", "0"],
        ["--scrub-bytes-per-second", "-1"],
        ["--scrub-every", "0"],
    ],
)
def test_bad_flags_are_refused_by_name(tmp_path: Path, flags: list[str]) -> None:
    """A flag that cannot be understood ends the start with status 2 and makes nothing."""
    command = [sys.executable, "-m", "holdfast_service", "--root", str(tmp_path / "root"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "root").exists()
