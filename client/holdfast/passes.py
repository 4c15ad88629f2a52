"""The two passes of a load: everything is proven before anything is handed over, and what is handed over is proven again.

The first pass reads in chunks that stay in a core's cache until they are digested. The second reads large pieces straight
into who receives them, and digests them there, chunk by chunk: a page that left memory in between may come back from the
disk as another. Where only a part of a large piece is wanted, the first pass takes that part's own digest too, from bytes
that it proves to be the piece's, so that the second need not read the rest again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from holdfast_formats import digest, proof
from holdfast_formats.proof import Piece

from .sources import Source
from .wants import Touched

# Who waits for a disk or a network keeps several requests under way. From memory, more threads than cores, and the one that
# hands them work, only push each other's chunks out of the cache.
READERS_WAITING, READERS_SPARE = 8, 1
PROBES = 64  # pieces looked at to tell which it is

Batch = Sequence[Touched]


def prove(source: Source, touched: Sequence[Touched]) -> None:
    """Read and check all of it; nothing is handed over. Raises `CorruptExtent` with file, tensor and byte range."""
    _on_threads(source, touched, lambda: _Prover(source).take)


def hand_over(source: Source, touched: Sequence[Touched], proven: bool) -> None:
    """Read it into who receives it. Raises `CorruptExtent` where it is not what was written, even if `prove` found it so.

    `proven` says that it did. Of a damaged piece that is larger than `chunk_bytes` and has one receiver, who takes its
    bytes as they lie in the file, those bytes are overwritten then.
    """
    trusted = proven and source.steady
    _on_threads(source, touched, lambda: _Giver(source, trusted).take)


def _readers(source: Source, touched: Sequence[Touched]) -> int:
    """How many threads read these pieces fastest."""
    probed = [item.piece for item in touched[:: max(len(touched) // PROBES, 1)]]
    waits = any(source.view(p.file, p.start, p.stop) is None and source.waits(p.file, p.start) for p in probed)
    return max(READERS_WAITING if waits else 1, (os.cpu_count() or 1) + READERS_SPARE)


def _batches(touched: Sequence[Touched], bytes_max: int) -> deque[Batch]:
    """Pieces that touch each other in the file together, so that small ones cost one read; large ones alone."""
    found: deque[Batch] = deque()
    batch: list[Touched] = []
    file, start, stop = "", 0, 0
    for item in touched:
        piece = item.piece
        if batch and piece.start == stop and piece.file == file and piece.start + piece.length - start <= bytes_max:
            batch.append(item)
        else:
            batch = [item]
            found.append(batch)
            file, start = piece.file, piece.start
        stop = piece.start + piece.length
    return found


def _on_threads(source: Source, touched: Sequence[Touched], worker: Callable[[], Callable[[Batch], None]]) -> None:
    """Take all batches, each thread with a worker of its own; the first error ends it and is raised."""
    jobs = _batches(touched, source.chunk_bytes)

    def drain() -> None:
        act = worker()
        try:
            while True:
                try:
                    job = jobs.popleft()
                except IndexError:
                    return
                act(job)
        except BaseException:
            jobs.clear()
            raise

    if len(jobs) <= 1:
        drain()
        return
    count = min(_readers(source, touched), len(jobs))
    with ThreadPoolExecutor(count, "holdfast-read") as threads:
        running = [threads.submit(drain) for _ in range(count)]
        try:
            for finished in running:
                finished.result()
        finally:
            jobs.clear()


class _Reading:
    """One thread's buffer, and the source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._memory = memoryview(b"")

    def all(self, file: str, start: int, size: int) -> memoryview:
        """Bytes of a file, fewer only where it ends before; good until the next call."""
        view = self._source.view(file, start, start + size)
        if view is not None:
            return view
        buffer = self._buffer(size)
        return buffer[: self._source.read_into(file, start, buffer)]

    def chunks(self, piece: Piece, cuts: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        """A piece in parts that stay in the cache, none of them across a cut; ends where the file does."""
        step = self._source.chunk_bytes
        for low, high in pairwise(sorted({0, *cuts, piece.length})):
            for at in range(low, high, step):
                size = min(step, high - at)
                part = self.all(piece.file, piece.start + at, size)
                yield at, part
                if len(part) < size:
                    return

    def _buffer(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = np.empty(max(size, self._source.chunk_bytes), np.uint8).data
        return self._memory[:size]


class _Prover:
    def __init__(self, source: Source) -> None:
        self._reading = _Reading(source)
        self._chunk_bytes = source.chunk_bytes

    def take(self, batch: Batch) -> None:
        first, last = batch[0].piece, batch[-1].piece
        if first.length > self._chunk_bytes:
            self._large(batch[0])
            return
        data = self._reading.all(first.file, first.start, last.stop - first.start)
        for item in batch:
            at = item.piece.start - first.start
            proof.check(item.piece, data[at : at + item.piece.length])

    def _large(self, item: Touched) -> None:
        piece, part = item.piece, item.part
        low, high = (part[0], part[0] + len(part[1])) if part is not None else (0, piece.length)
        whole, wanted, held = digest.running(), digest.running(), 0
        for at, data in self._reading.chunks(piece, (low, high)):
            whole.update(data)
            if high - low < piece.length and low <= at < high:
                wanted.update(data)
            held += len(data)
        proof.check_found(piece, held, whole.hexdigest())
        item.part_digest = wanted.hexdigest() if high - low < piece.length else piece.digest


class _Giver:
    def __init__(self, source: Source, trusted: bool) -> None:
        self._source = source
        self._reading = _Reading(source)
        self._trusted = trusted

    def take(self, batch: Batch) -> None:
        first, last = batch[0].piece, batch[-1].piece
        if first.length > self._source.chunk_bytes and self._straight(batch[0]):
            return
        data = self._reading.all(first.file, first.start, last.stop - first.start)
        for item in batch:
            at = item.piece.start - first.start
            mine = data[at : at + item.piece.length]
            if not self._trusted:
                proof.check(item.piece, mine)
            for receiver in item.receivers:
                receiver.take(item.piece.offset, mine)

    def _straight(self, item: Touched) -> bool:
        """Read a large piece into its only receiver, if it is one that can take it so and what it takes can be proven."""
        piece, part = item.piece, item.part
        if part is None:
            return False
        low, octets = part
        expected = piece.digest if len(octets) == piece.length else item.part_digest
        if expected is None:
            return False
        start = piece.start + low
        view = self._source.view(piece.file, start, start + len(octets))
        if view is not None and self._trusted:
            _copy(octets, view)
            return True
        found, held, step = digest.running(), 0, self._source.chunk_bytes
        for at in range(0, len(octets), step):
            into = octets[at : at + step]
            if view is not None:
                _copy(into, view[at : at + step])
                got = len(into)
            else:
                got = self._source.read_into(piece.file, start + at, into)
            found.update(into[:got])
            held += got
            if got < len(into):
                break
        proof.check_found(piece, held + piece.length - len(octets), found.hexdigest(), expected)
        return True


def _copy(into: memoryview, data: memoryview) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))  # others compute meanwhile
