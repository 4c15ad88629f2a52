"""The loader: ranks of one machine are answered together, out of memory that nobody can change, and that is given back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.read.shared_load import LentMemory
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import DaemonGone, InvalidRequest
from holdfast_formats.staging import arena as formats
from holdfast_formats.staging import piece_list, wire
from holdfast_formats.staging.piece_list import PieceList
from holdfast_service.daemon.arena import arena
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.budget import Budget
from holdfast_service.daemon.shared_reads.loader import Key, Loader, Wish
from holdfast_service.daemon.shared_reads.sealed_memory import SealedMemory as Lent
from holdfast_service.daemon.shared_reads.sealed_memory import read_listing
from holdfast_service.storage import PosixTier, Tier
from tests.checkpoints import Built, build, flip
from tests.daemons import wait_until

KEY = Key("tiny", 1, 5)


class SlowTier:
    """A tier whose reads wait while `shut`; `reading` is set as soon as one does."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.open, self.reading = threading.Event(), threading.Event()
        self.open.set()
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        self.reading.set()
        self.reads += 1
        assert self.open.wait(30)
        return self._tier.read_into(path, offset, buffer)


class Rank:
    """A rank that asks, and keeps what it is sent."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.answer: wire.Loaded | None = None
        self.memory: LentMemory | None = None
        self._heard = threading.Event()

    def ask(self, pieces: list[Piece], peers: int = 2) -> Rank:
        self._heard.clear()
        request = wire.Load(id=self.number, step=5, peers=peers)
        self.world.loader.ask(KEY, Wish(self, request, piece_list.of(pieces), self._send))
        return self

    def _send(self, answer: wire.Loaded, fds: tuple[int, ...]) -> None:
        assert not self._heard.is_set(), "a wish is answered once"
        self.answer = answer
        self.fd = os.dup(fds[0]) if fds else -1
        self.memory = LentMemory(fds[0]) if fds else None
        self._heard.set()

    def told(self, timeout_s: float = 30) -> wire.Loaded:
        assert self._heard.wait(timeout_s), "no answer"
        assert self.answer is not None and self.answer.reply_to == self.number
        return self.answer

    def holds(self, pieces: list[Piece]) -> set[Piece]:
        """Those of the pieces that the lent memory has, each compared with the file."""
        found = set()
        for piece in pieces:
            if self.memory is not None and self.memory.holds(piece):
                view = self.memory.view(piece.file, piece.start, piece.stop)
                assert view is not None
                verification.check(piece, view)
                found.add(piece)
        return found


class World:
    """A loader over a checkpoint in a directory."""

    def __init__(self, directory: Path, bytes_max: int = 2**30, **times: float) -> None:
        self.built: Built = build(directory / naming.checkpoint_path("tiny", 5))
        self.tier = SlowTier(PosixTier(directory))
        self.arena = Arena(Budget(bytes_max))
        self.loader = Loader(self.tier, self.arena, **{"gather_s": 20.0, **times})
        found = verification.pieces(self.built.manifest)
        self.pieces = [p for file in self.built.manifest.files if file.header_bytes for p in found[file.name]]

    def ranks(self, count: int) -> list[Rank]:
        return [Rank(self, number) for number in range(count)]

    def freed(self) -> bool:
        return self.arena.bytes == 0 and not lent_by_us()


def lent_by_us() -> list[str]:
    """The lent memory that this process has open, but for what ranks here keep."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith("/memfd:holdfast-load")]


@contextmanager
def loading(directory: Path, bytes_max: int = 2**30, **times: float) -> Iterator[World]:
    world = World(directory, bytes_max, **times)
    try:
        yield world
    finally:
        world.tier.open.set()
        world.loader.close()
        assert world.arena.bytes == 0


def close(*ranks: Rank) -> None:
    for rank in ranks:
        if rank.fd >= 0:
            os.close(rank.fd)


def test_ranks_are_answered_together_and_each_byte_is_read_once(tmp_path: Path) -> None:
    """Three ranks want overlapping parts: each has the pieces that another wants too, all proven, and read only once."""
    with loading(tmp_path) as world:
        first, second, third = world.ranks(3)
        half = len(world.pieces) // 2
        first.ask(world.pieces, 3)
        second.ask(world.pieces[:half], 3)
        assert first.answer is None
        third.ask(world.pieces[half - 1 : -1], 3)
        shared = world.pieces[:-1]
        for rank in (first, second, third):
            assert rank.told().pieces == len(shared) and rank.answer.notice == ""
            assert rank.holds(world.pieces) == set(shared)
        assert world.loader.counts.all() == {"node": sum(piece.length for piece in shared), "rank": 0}
        assert world.arena.bytes >= sum(piece.length for piece in shared)
        close(first, second, third)
        for rank in (first, second):
            world.loader.leave(rank)
        assert world.arena.bytes > 0
        world.loader.leave(third)
        wait_until(world.freed)


def test_lent_memory_cannot_be_changed(tmp_path: Path) -> None:
    """Whoever has the descriptor can neither write, nor shrink it, nor map it writable, nor take the seals off."""
    with loading(tmp_path) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        first.told()
        path = f"/proc/self/fd/{first.fd}"
        with pytest.raises(PermissionError):
            os.pwrite(first.fd, b"x", 5000)
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
        assert first.holds(world.pieces) == set(world.pieces)
        second.told()
        close(first, second)


def test_memory_that_is_not_sealed_is_not_trusted() -> None:
    """A rank takes nothing out of memory that could still change, whatever it says."""
    memory = Lent("test", 4096)
    with pytest.raises(InvalidRequest, match="not sealed"):
        LentMemory(memory.fd)
    memory.close()


def test_a_rank_that_is_alone_waits_for_a_moment_only(tmp_path: Path) -> None:
    """Who comes in time is waited for, no longer than that; a rank that says it has no peers, not at all."""
    with loading(tmp_path, gather_s=0.2) as world:
        (alone,) = world.ranks(1)
        began = time.monotonic()
        assert alone.ask(world.pieces).told() == wire.Loaded(reply_to=0)
        assert time.monotonic() - began >= 0.2
    with loading(tmp_path / "other", gather_s=60.0) as world:
        assert world.ranks(1)[0].ask(world.pieces, peers=1).told() == wire.Loaded(reply_to=0)
        assert world.loader.counts.all()["node"] == 0


def test_who_comes_late_gets_what_is_there(tmp_path: Path) -> None:
    """While memory is lent, a third rank has it at once, and nothing is read again; it keeps the memory alive alone."""
    with loading(tmp_path) as world:
        first, second, third = world.ranks(3)
        first.ask(world.pieces[:4]), second.ask(world.pieces[:4])
        first.told(), second.told()
        reads = world.tier.reads
        third.ask(world.pieces)
        assert third.told().pieces == 4
        assert world.tier.reads == reads
        world.loader.leave(first), world.loader.leave(second)
        assert world.arena.bytes > 0
        close(first, second, third)
        world.loader.leave(third)
        wait_until(world.freed)


def test_a_second_restore_is_a_load_of_its_own(tmp_path: Path) -> None:
    """Ranks that ask once more, while one of them is not done with the first, are gathered and read for anew."""
    with loading(tmp_path) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        first.told(), second.told()
        before = world.loader.counts.all()["node"]
        world.loader.leave(first)
        close(first)
        first.ask(world.pieces[:3])
        close(second)
        second.ask(world.pieces[:3])
        assert first.told().pieces == second.told().pieces == 3
        assert world.loader.counts.all()["node"] == before + sum(piece.length for piece in world.pieces[:3])
        close(first, second)


def test_a_damaged_piece_is_lent_to_nobody(tmp_path: Path) -> None:
    """One wrong bit, a file cut off, a file gone: those pieces are missing, with a notice; all others are there."""
    with loading(tmp_path) as world:
        files = sorted({piece.file for piece in world.pieces})
        bad = next(piece for piece in world.pieces if piece.file == files[0] and piece.length > 500)
        flip(world.built.path / files[0], bad.start + 100)
        gone = {piece for piece in world.pieces if piece.file == files[1]}
        (world.built.path / files[1]).unlink()
        cut = max(piece for piece in world.pieces if piece.file == files[2])
        os.truncate(world.built.path / files[2], cut.stop - 1)
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        for rank in (first, second):
            missing = set(world.pieces) - rank.holds(world.pieces) if rank.told() else set()
            assert {bad, cut} | gone <= missing
            assert not any(piece.file not in files[:3] for piece in missing)
            assert f"{len(missing)} pieces" in rank.answer.notice
        close(first, second)


def test_memory_that_is_not_given_back_is_lent_for_a_while_only(tmp_path: Path) -> None:
    """After `lent_s` the arena has its room again, though a rank has not said that it is done; what that one has stays."""
    with loading(tmp_path, lent_s=0.2) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        first.told(), second.told()
        wait_until(lambda: world.arena.bytes == 0)
        assert first.holds(world.pieces) == set(world.pieces)
        close(first, second)
        wait_until(world.freed)


def test_a_rank_that_dies_waiting_harms_nobody(tmp_path: Path) -> None:
    """One of three goes away before the third asks: the others are answered, and memory is freed when they are done."""
    with loading(tmp_path) as world:
        first, second, third = world.ranks(3)
        first.ask(world.pieces, 3), second.ask(world.pieces, 3)
        world.loader.leave(second)
        third.ask(world.pieces, 3)
        assert first.told().pieces == third.told().pieces == len(world.pieces)
        assert second.answer is None
        close(first, third)
        world.loader.leave(first), world.loader.leave(third)
        wait_until(world.freed)


def test_what_nobody_waits_for_is_read_no_further(tmp_path: Path) -> None:
    """All ranks die while the first pieces are read: the rest is not, and the memory is freed."""
    with loading(tmp_path) as world:
        world.tier.open.clear()
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        assert world.tier.reading.wait(30) and lent_by_us() and world.arena.bytes > 0
        world.loader.leave(first), world.loader.leave(second)
        world.tier.open.set()
        wait_until(world.freed)
        assert first.answer is None and second.answer is None


def test_there_is_room_for_a_part(tmp_path: Path) -> None:
    """With too small a budget, the first files are shared and a notice says how much is not; with none, nothing is."""
    with loading(tmp_path, bytes_max=12_000) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        held = first.holds(world.pieces) if first.told().pieces else set()
        in_order = sorted(world.pieces)
        assert 0 < len(held) < len(in_order) and held == set(in_order[: len(held)])
        assert "memory has room for" in first.answer.notice and second.told().notice == first.answer.notice
        assert world.arena.bytes <= 12_000
        close(first, second)
    with loading(tmp_path / "none", bytes_max=0) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        assert first.told().pieces == 0 and "room for 0.0 of the" in first.answer.notice
        assert world.tier.reads == 0


def test_slots_wait_for_lent_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reserves slots while memory is lent gets all of them once it is given back, not fewer at once."""
    asked = formats.geometry(2, 48 * 4096, 4096)
    with loading(tmp_path, asked.segment_bytes) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        first.told(), second.told()
        giving = threading.Timer(0.3, lambda: (world.loader.leave(first), world.loader.leave(second)))
        giving.start()
        segment = world.arena.reserve(asked, "rank0")
        assert (segment.geometry.slots, segment.notice) == (2, "")
        world.arena.drop(segment)
        giving.join()
        close(first, second)
    with loading(tmp_path / "never", asked.segment_bytes) as world:
        monkeypatch.setattr(arena, "RETURN_WAIT_S", 0.05)
        first, second = world.ranks(2)
        first.ask(world.pieces), second.ask(world.pieces)
        first.told(), second.told()
        segment = world.arena.reserve(asked, "rank0")
        assert segment.geometry.slots == 1 and "1 slot instead of 2" in segment.notice
        world.arena.drop(segment)
        close(first, second)


def test_the_end_of_the_daemon_ends_the_wait(tmp_path: Path) -> None:
    """Who waits is told that nothing is shared; who asks afterwards is refused."""
    with loading(tmp_path) as world:
        first, second = world.ranks(2)
        first.ask(world.pieces)
        world.loader.close()
        assert first.told().pieces == 0
        with pytest.raises(DaemonGone, match="shutting down"):
            second.ask(world.pieces)


def test_what_is_no_listing_is_refused(tmp_path: Path) -> None:
    """A pipe, an empty memfd, one of noise, one that is too large: by name, without reading it all."""
    reading, writing = os.pipe()
    noise, large = os.memfd_create("noise"), os.memfd_create("large")
    os.write(noise, b"noise" * 100)
    os.ftruncate(large, piece_list.LISTING_BYTES_MAX + 1)
    for fd in (reading, noise, large):
        with pytest.raises(InvalidRequest):
            read_listing(fd)
    good = os.memfd_create("good")
    os.write(good, piece_list.encode(PieceList((), piece_list.of([]).rows)))
    assert len(read_listing(good).rows) == 0
    for fd in (reading, writing, noise, large, good):
        os.close(fd)
