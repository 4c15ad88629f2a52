"""Frames and descriptors of one rank's socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging import wire
from holdfast_service.daemon.rank_socket import FDS_MAX, RankSocket, Unsent

PING = wire.encode_frame(wire.Ping(id=1))


@contextmanager
def connected() -> Iterator[tuple[RankSocket, socket.socket]]:
    """The daemon's end, and the rank's."""
    here, there = socket.socketpair()
    ours = RankSocket(here)
    with there:
        try:
            yield ours, there
        finally:
            ours.close()


def descriptors(file: Path) -> int:
    """How many descriptors of this process lead to a file."""
    return sum(one.exists() and one.samefile(file) for one in Path("/proc/self/fd").iterdir())


def test_requests_come_as_they_were_received_until_the_rank_hangs_up() -> None:
    with connected() as (ours, rank):
        rank.sendall(PING + PING + PING[:5])
        received = ours.requests()
        assert [request.id for request in next(received)] == [1, 1]
        rank.sendall(PING[5:])
        rank.shutdown(socket.SHUT_WR)
        assert [len(requests) for requests in received] == [1]


def test_descriptors_are_taken_in_order_and_closed_after_use(tmp_path: Path) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    with connected() as (ours, rank):
        received = ours.requests()
        for file in files:
            with file.open("w") as sent:
                socket.send_fds(rank, [PING], [sent.fileno()])
                next(received)
        for file in files:
            with ours.received_fd("a segment") as fd:
                assert os.path.samestat(os.fstat(fd), file.stat()) and not os.get_inheritable(fd)
            assert not descriptors(file)
        with (
            pytest.raises(InvalidRequest, match="attaching a segment needs its file descriptor"),
            ours.received_fd("a segment"),
        ):
            pass


def test_a_rank_that_sends_descriptors_for_nothing_is_cut_off_and_they_are_closed(tmp_path: Path) -> None:
    with connected() as (ours, rank):
        received = ours.requests()
        with (tmp_path / "file").open("w") as sent:
            for _ in range(FDS_MAX):
                socket.send_fds(rank, [PING], [sent.fileno()])
                next(received)
            socket.send_fds(rank, [PING], [sent.fileno()])
            with pytest.raises(LimitExceeded, match="17 unexpected"):
                next(received)
        assert descriptors(tmp_path / "file") == FDS_MAX + 1
    assert not descriptors(tmp_path / "file")


def test_a_reply_to_a_rank_that_is_gone_fails_and_an_outcome_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with connected() as (ours, rank):
        assert not ours.has_lost_its_rank()
        rank.close()
        assert ours.has_lost_its_rank()
        with pytest.raises(Unsent):
            ours.send(wire.Done(reply_to=1))
        ours.notify(wire.Stop())
        assert "cannot tell a rank that it is to stop" in caplog.text
    assert ours.has_lost_its_rank()
