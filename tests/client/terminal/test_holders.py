"""doctor lists the holder processes: whose memory they keep, how much, for how long, and what they have given up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.terminal import holders
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_service.daemon.arena.fd_keeper import HolderProcess
from holdfast_service.daemon.arena.holder import Start
from holdfast_service.daemon.arena.segment import ArenaSegment, memfd
from tests.daemons import wait_until


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[HolderProcess]:
    """A holder for /the/root, which has a segment whose first slot is sealed for step 5 of run r."""
    keeper = HolderProcess(tmp_path / "x.holder", Start(["true"], "/", {}, "/the/root", "id"))
    geometry = arena.geometry(1, 100_000, 8)
    segment = ArenaSegment.make(memfd("test", geometry.segment_bytes), geometry, SegmentOwner("r", 0, 1, 1))
    segment.lease(5, 1, 0.0)
    arena.set_state(segment.memory, geometry, 0, SlotState.SEALED)
    keeper.keep("a", segment.fd)
    yield keeper
    keeper.drop("a")
    keeper.close()
    segment.close()


def test_a_holder_beside_its_daemon(keeper: HolderProcess, tmp_path: Path) -> None:
    """Nothing is wrong; its process, its root and its bytes are named."""
    (found,) = holders.found(tmp_path)
    assert found.status == "ok" and "of /the/root for" in found.what and "process" in found.what


def test_a_holder_without_a_daemon(keeper: HolderProcess, tmp_path: Path) -> None:
    """What is staged there and not committed is named, with what to do."""
    keeper.close()
    wait_until(lambda: [one.status for one in holders.found(tmp_path)] == ["warn"])
    (found,) = holders.found(tmp_path)
    assert ("no daemon has connected to it") in found.what and "r@5" in found.advice and "Start the daemon" in found.advice
    assert [name for name, fd in keeper.take() if os.close(fd) is None] == ["a"]


def test_what_a_holder_has_given_up_is_shown(tmp_path: Path) -> None:
    """From the record that it left; a broken record and the socket of a killed holder are no obstacle."""
    save = {"run": "r", "step": 5, "rank": 0, "world": 1}
    record = {"at": 0, "why": "its root /the/root is gone", "root": "/the/root", "bytes": 9, "saves": [save]}
    (tmp_path / "a.lost").write_text(json.dumps(record) + "\n")
    (tmp_path / "b.lost").write_text("[]\n")
    keeper, fd = HolderProcess(tmp_path / "y.holder"), os.memfd_create("test")
    keeper.keep("a", fd)
    (pid,) = [int(one.what.split()[1]) for one in holders.found(tmp_path) if "holds" in one.what]
    os.kill(pid, signal.SIGKILL)
    keeper.close()
    os.close(fd)
    wait_until(lambda: len(list(holders.found(tmp_path))) == 2)
    given_up, unreadable = holders.found(tmp_path)
    assert "r@5" in given_up.what and "is gone" in given_up.what and "a.lost" in given_up.advice
    assert "b.lost cannot be read" in unreadable.what
