"""Frames and descriptors of the connection to one daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.link.daemon_socket import DaemonSocket
from holdfast_formats.errors import DaemonGone
from holdfast_formats.staging import wire

DONE = wire.encode_frame(wire.Done(reply_to=1))


@contextmanager
def connected() -> Iterator[tuple[DaemonSocket, socket.socket]]:
    """The rank's end, and the daemon's."""
    here, there = socket.socketpair()
    ours = DaemonSocket(here, Path("sock"))
    with there:
        try:
            yield ours, there
        finally:
            ours.close()


def send_with(daemon: socket.socket, file: Path) -> None:
    with file.open("w") as opened:
        socket.send_fds(daemon, [DONE], [opened.fileno()])


def descriptors(file: Path) -> int:
    """How many descriptors of this process lead to a file."""
    return sum(one.exists() and one.samefile(file) for one in Path("/proc/self/fd").iterdir())


def test_descriptors_come_before_their_message_and_are_taken_in_order(tmp_path: Path) -> None:
    with connected() as (ours, daemon):
        messages = ours.messages()
        for name in ("first", "second", "third"):
            send_with(daemon, tmp_path / name)
            assert next(messages) == wire.Done(reply_to=1)
        with pytest.raises(DaemonGone, match="without shared memory"):
            ours.take_fds(4)
        taken = ours.take_fds(2)
        assert [
            os.path.samestat(os.fstat(fd), (tmp_path / name).stat())
            for fd, name in zip(taken, ("first", "second"), strict=True)
        ]
        for fd in taken:
            os.close(fd)
    assert not descriptors(tmp_path / "third")


def test_descriptors_that_come_after_the_next_connection_has_begun_are_closed(tmp_path: Path) -> None:
    with connected() as (ours, daemon):
        messages = ours.messages()
        ours.release_fds()
        send_with(daemon, tmp_path / "late")
        next(messages)
        assert not descriptors(tmp_path / "late")
        with pytest.raises(DaemonGone):
            ours.take_fds(1)


def test_messages_that_may_be_lost_do_not_wait_for_a_daemon_that_reads_nothing() -> None:
    count, ping = 20_000, wire.Ping(id=1)
    with connected() as (ours, daemon):
        for _ in range(count):
            ours.send_or_lose(ping)
        daemon.setblocking(False)
        decoder, come = wire.FrameDecoder(wire.TO_DAEMON), 0
        with suppress(BlockingIOError):
            while True:
                come += len(decoder.feed(daemon.recv(65_536)))
        assert 0 < come < count
        daemon.close()
        ours.send_or_lose(ping)


def test_the_end_of_the_connection_ends_the_messages_and_fails_what_is_sent() -> None:
    with connected() as (ours, _):
        ours.shut_down()
        assert list(ours.messages()) == []
        with pytest.raises(OSError, match="Broken pipe"):
            ours.send(wire.Ping(id=1))
        ours.shut_down()
