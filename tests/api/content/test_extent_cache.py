"""Proven extents on loan: never a byte that was not proven, read once for all who want it at a time, in bounded memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptExtent, CorruptManifest
from holdfast_service.api.content import extent_cache
from holdfast_service.api.content.extent_cache import SLAB_BYTES, CachedCheckpoint, ProvenExtents
from holdfast_service.storage import PosixTier
from holdfast_service.storage.tier import Buffer
from tests.checkpoints import Built, build, flip

SOURCE = CachedCheckpoint(naming.checkpoint_path("run", 5), "ab" * 32)


class CountingTier(PosixTier):
    """A real tier that counts its reads; the first ones wait for one another, so that threads meet."""

    def __init__(self, root: Path, together: int = 1) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int]] = []
        self.meeting = threading.Barrier(together)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        self.reads.append((path, offset))
        if self.meeting.parties > len(self.reads) - 1 and self.meeting.parties > 1:
            self.meeting.wait(180)
        return super().read_into(path, offset, buffer)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Tensors of several extents of 64 KiB, and small ones."""
    rng = np.random.default_rng(3)
    tensors = {f"t{i}": rng.integers(0, 255, 700_000, np.uint8) for i in range(6)}
    tensors |= {f"small{i}": rng.integers(0, 255, 100, np.uint8) for i in range(6)}
    directory = tmp_path / naming.checkpoint_path("run", 5)
    return build(directory, {"model": tensors}, run="run", file_bytes_max=1_500_000, extent_bytes=2**16)


def pieces(built: Built) -> list[Piece]:
    return [piece for listed in verification.pieces(built.manifest).values() for piece in listed if piece.tensor is not None]


def take(held: ProvenExtents, wanted: Sequence[Piece]) -> dict[Piece, bytes]:
    found: dict[Piece, bytes] = {}
    with held.opened():
        for run, data in held.lend(SOURCE, wanted):
            assert data.nbytes == run[-1].stop - run[0].start
            for piece in run:
                at = piece.start - run[0].start
                found[piece] = data[at : at + piece.length].tobytes()
    return found


def stored(built: Built, piece: Piece) -> bytes:
    return (built.path / piece.file).read_bytes()[piece.start : piece.stop]


def test_every_piece_is_lent_as_it_is_stored(tmp_path: Path, built: Built) -> None:
    """Any choice of pieces in any order comes whole, each once; neighbours cost one read."""
    tier = CountingTier(tmp_path)
    everything = pieces(built)
    random.Random(1).shuffle(everything)
    got = take(ProvenExtents(tier), everything)
    assert got == {piece: stored(built, piece) for piece in everything}
    assert len(tier.reads) <= 2 * len({piece.file for piece in everything})
    some = everything[:20]
    assert take(ProvenExtents(tier), some) == {piece: stored(built, piece) for piece in some}
    assert take(ProvenExtents(tier), []) == {}


def test_what_is_kept_is_read_once(tmp_path: Path, built: Built) -> None:
    """While somebody reads, extents stay for the next one; afterwards all memory is gone."""
    tier = CountingTier(tmp_path)
    held = ProvenExtents(tier)
    large = [piece for piece in pieces(built) if piece.tensor == "t0"]
    with held.opened():
        first = take(held, large)
        reads = len(tier.reads)
        assert take(held, large[3:]) == {piece: first[piece] for piece in large[3:]}
        assert len(tier.reads) == reads
        assert held.bytes == SLAB_BYTES
    assert held.bytes == 0


def test_few_slabs_serve_many_threads(tmp_path: Path, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one or two slabs for eight threads, all get right bytes, and there are never more slabs."""
    monkeypatch.setattr(extent_cache, "KEPT_BYTES_MIN", 1)
    everything = pieces(built)
    for slabs in (1, 2):
        held = ProvenExtents(PosixTier(tmp_path), slabs)
        most: list[int] = []

        def read(seed: int, held: ProvenExtents = held, most: list[int] = most) -> None:
            rng = random.Random(seed)
            for _ in range(10):
                for piece, data in take(held, rng.sample(everything, 15)).items():
                    assert data == stored(built, piece)
                most.append(held.bytes)

        with held.opened(), ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(read, seed) for seed in range(8)]:
                done.result(180)
        assert 0 < max(most) <= slabs * SLAB_BYTES


def test_two_who_want_the_same_read_it_once(tmp_path: Path, built: Built) -> None:
    """Who comes while an extent is being read waits for it, and gets it."""
    tier = CountingTier(tmp_path, together=2)
    held = ProvenExtents(tier)
    large = [piece for piece in pieces(built) if piece.tensor == "t1"]
    with held.opened(), ThreadPoolExecutor(2) as threads:
        both = [threads.submit(take, held, large) for _ in range(2)]
        tier.meeting.wait(180)  # one of them reads; the other one cannot
        found = [done.result(180) for done in both]
    assert found[0] == found[1] == {piece: stored(built, piece) for piece in large}
    assert len(tier.reads) == 1


def test_damage_is_not_lent_and_not_kept(tmp_path: Path, built: Built) -> None:
    """A damaged extent is an error each time it is asked for; once it is mended, it is lent."""
    held = ProvenExtents(PosixTier(tmp_path))
    large = [piece for piece in pieces(built) if piece.tensor == "t2"]
    flip(built.path / large[4].file, large[4].start)
    with held.opened():
        for _ in range(2):
            with pytest.raises(CorruptExtent, match="'t2'"):
                take(held, large)
        flip(built.path / large[4].file, large[4].start)
        assert take(held, large) == {piece: stored(built, piece) for piece in large}
        assert held.bytes == SLAB_BYTES


def test_files_that_are_short_or_gone(tmp_path: Path, built: Built) -> None:
    """A cut file is damage of the extent that lost bytes; a missing one is named."""
    held = ProvenExtents(PosixTier(tmp_path))
    last = max(pieces(built), key=lambda piece: (piece.file == "model-00001-of-00004.safetensors", piece.start))
    path = built.path / last.file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptExtent, match="cut off"):
        take(held, [last])
    path.unlink()
    with pytest.raises(CorruptManifest, match="missing"):
        take(held, [last])
