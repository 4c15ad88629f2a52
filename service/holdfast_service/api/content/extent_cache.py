"""Cache of verified extents: whole extents are read and checked once, and kept while memory lasts (I7).

A shard download needs the same extent for several windows, and ranks that load the same checkpoint need the same extents.
Memory is a fixed number of slabs, and none without a reader.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CorruptManifest, NoSuchResource
from holdfast_formats.files import Files

SLAB_BYTES = EXTENT_BYTES_MAX  # one read: an extent, or several that touch
SLABS_MAX = 6  # 96 MiB
KEPT_BYTES_MIN = 2**18  # a smaller read costs less to repeat than a slab is worth

Octets = NDArray[np.uint8]
Lent = tuple[Sequence[Piece], Octets]  # pieces that follow each other in a file, and all their bytes
Key = tuple[str, str, int]  # the manifest's SHA-256, file, first byte


class CachedCheckpoint(NamedTuple):
    """A committed checkpoint: its directory below the tier's root, and its manifest's SHA-256."""

    directory: str
    sha256: str


class _Block:
    """A slab with extents in it. It is ready once they are verified, and stays while it has users."""

    __slots__ = ("keys", "ready", "slab", "start", "users")

    def __init__(self, keys: Sequence[Key], slab: Octets, start: int) -> None:
        self.keys = keys
        self.slab = slab
        self.start = start
        self.ready = False
        self.users = 1


class ProvenExtents:
    """Lends verified extents of committed checkpoints to any number of threads."""

    def __init__(self, tier: Files, slabs_max: int = SLABS_MAX) -> None:
        self._tier = tier
        self._slabs_max = slabs_max
        self._changed = threading.Condition()
        self._where: dict[Key, _Block] = {}
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by identity, last used last
        self._free: list[Octets] = []
        self._readers = 0

    @property
    def bytes(self) -> int:
        with self._changed:
            return (len(self._blocks) + len(self._free)) * SLAB_BYTES

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While one such block is open, extents are cached; the last one frees all memory."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._readers == 0:
                    self._where.clear()
                    self._blocks.clear()
                    self._free.clear()

    def lend(self, source: CachedCheckpoint, pieces: Sequence[Piece]) -> Iterator[Lent]:
        """The pieces and their verified bytes, by file and position, valid until the next iteration.

        To be used inside `opened`. Raises `CorruptExtent` for damaged pieces, `CorruptManifest` for a missing file,
        `StorageFailed`.
        """
        for batch in verification.batches(verification.grouped(pieces), SLAB_BYTES):
            left = batch
            while left:
                count = yield from self._lend_some(source, left)
                left = left[count:]

    def read(self, source: CachedCheckpoint, run: Sequence[Piece], target: Octets) -> None:
        """Read consecutive pieces of a file into the caller's memory, and verify them there.

        For bytes used once and unchanged. Raises as `lend` does.
        """
        name = run[0].file
        try:
            size = self._tier.read_into(f"{source.directory}/{name}", run[0].start, target)
        except NoSuchResource as error:
            raise CorruptManifest(f"{name} is missing", file=name) from error
        for piece in run:
            at = piece.start - run[0].start
            verification.check(piece, target[at : min(at + piece.length, size)])

    def _lend_some(self, source: CachedCheckpoint, pieces: Sequence[Piece]) -> Generator[Lent, None, int]:
        """The first pieces of a batch, as many as are in one block or can be read at once; returns how many."""
        keys = [(source.sha256, piece.file, piece.start) for piece in pieces]
        block, count = self._claim(keys, pieces)
        run = pieces[:count]
        if block is None:  # a few bytes
            small: Octets = np.empty(run[-1].stop - run[0].start, np.uint8)
            self.read(source, run, small)
            yield run, small
            return count
        try:
            if not block.ready:
                self._fill(source, run, block)
            yield run, block.slab[run[0].start - block.start : run[-1].stop - block.start]
        finally:
            with self._changed:
                block.users -= 1
                self._changed.notify_all()
        return count

    def _claim(self, keys: Sequence[Key], pieces: Sequence[Piece]) -> tuple[_Block | None, int]:
        """The block of the first piece, and how many of the pieces are in it; a new one, to be filled, if there is none.

        None if so little is read that no block is made. No lock is held while this waits.
        """
        with self._changed:
            while True:
                block = self._where.get(keys[0])
                if block is not None and block.ready:
                    block.users += 1
                    self._blocks.move_to_end(id(block))
                    return block, self._run(keys, block)
                if block is None:
                    count = self._run(keys, None)
                    if pieces[count - 1].stop - pieces[0].start < KEPT_BYTES_MIN:
                        return None, count
                    slab = self._slab()
                    if slab is not None:
                        return self._new_block(keys[:count], slab, pieces[0].start), count
                self._changed.wait()

    def _run(self, keys: Sequence[Key], block: _Block | None) -> int:
        """How many of the keys, from the first on, are in this block, or in none."""
        return sum(1 for _ in takewhile(lambda key: self._where.get(key) is block, keys))

    def _new_block(self, keys: Sequence[Key], slab: Octets, start: int) -> _Block:
        block = _Block(keys, slab, start)
        self._where.update(dict.fromkeys(keys, block))
        self._blocks[id(block)] = block
        return block

    def _slab(self) -> Octets | None:
        """An unused slab; None if all are in use."""
        if self._free:
            return self._free.pop()
        if len(self._blocks) < self._slabs_max:
            return np.frombuffer(mmap.mmap(-1, SLAB_BYTES), np.uint8)
        oldest = next((block for block in self._blocks.values() if not block.users), None)
        if oldest is not None:
            self._forget(oldest)
            return oldest.slab
        return None

    def _forget(self, block: _Block) -> None:
        for key in block.keys:
            del self._where[key]
        del self._blocks[id(block)]

    def _fill(self, source: CachedCheckpoint, run: Sequence[Piece], block: _Block) -> None:
        try:
            self.read(source, run, block.slab[: run[-1].stop - run[0].start])
        except BaseException:
            with self._changed:
                self._forget(block)
                self._free.append(block.slab)
                self._changed.notify_all()
            raise
        with self._changed:
            block.ready = True
            self._changed.notify_all()
