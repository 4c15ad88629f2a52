"""Load passes: one that verifies each extent as it is copied, or two, if everything must be verified first.

Tensors stored contiguously are read directly into place, in chunks that stay in the CPU cache until they are digested; if a
digest does not match, the place is zeroed. Other tensors, and direct I/O, which needs its own buffers, are verified in a
buffer and then copied. The second of two passes verifies again: a page that left memory in between may come back different.
Bytes in memory or in the page cache take one call for many extents (`proving`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from holdfast.memory import native_copy
from holdfast.read.copies import Copies
from holdfast.read.overwrite_guard import unnoticed
from holdfast.read.requests import ExtentRun, copy
from holdfast.read.sources import Source
from holdfast_files import direct
from holdfast_formats import digest
from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError

# A reader of a disk or network keeps several requests in flight, long ones past the page cache: eight of 4 MiB take an
# eighth less time than four, and no more than sixteen of 2 MiB. From memory, as many as there are cores: one more takes a
# tenth longer, because threads that share a core evict each other's chunks from the cache. (Medians of nine and of fifteen
# rounds.)
READERS_WAITING = 8
WAITING_CHUNK_BYTES, DIRECT_CHUNK_BYTES = 2**21, 2**22
STRAIGHT_BYTES = 2**22  # of extents that one call reads to their places: it digests each while a core's cache has it
COPIED_BYTES_MIN = 2**19  # at once: a core's cache has it still, and many calls to copy little keep other threads waiting
GAPS_SHARE = 0.05
PROBES = 64  # places sampled to decide


class Manner(NamedTuple):
    """Number of threads, read size, and how to bypass the page cache, if at all."""

    readers: int
    chunk_bytes: int
    past_cache: direct.Reader | None = None
    straight: bool = False  # nothing is waited for, and one call brings many extents to their places and proves them
    gap_bytes: int = 0  # that one read may have between extents
    buffers_bytes_max: int = 0

    @property
    def straight_bytes(self) -> int:
        """Bytes of a read that goes directly into place."""
        return max(STRAIGHT_BYTES, self.chunk_bytes) if self.straight else self.chunk_bytes


class ReadPart(NamedTuple):
    """Extents of a run that are read together: bytes [start, stop) of the file."""

    run: ExtentRun
    extents: Sequence[Extent]
    start: int
    stop: int


Job = Sequence[ReadPart]  # they follow each other in the file, with small gaps where a source reads those along


def windows(source: Source) -> int:
    """How many threads read whole pieces of files in a row, each into a buffer of its own."""
    return min(READERS_WAITING, max(source.buffers_bytes_max // EXTENT_BYTES_MAX, 1))


def check(copies: Copies, pieces: Iterable[Piece]) -> None:
    """Read and check a few pieces. Raises `CorruptExtent` with file, tensor and byte range."""
    for piece in pieces:
        copies.read(partial(_check_piece, piece))


def _check_piece(piece: Piece, source: Source) -> None:
    _Reading(source, Manner(1, source.chunk_bytes)).check(piece)


def prove(copies: Copies, runs: Sequence[ExtentRun], cores: int) -> None:
    """Read and check runs without storing them. Raises `CorruptExtent` with file, tensor and byte range."""
    manner = _manner(copies.nearest, runs, cores, again=True)._replace(straight=False)
    _on_threads(runs, manner, lambda: _Reader(_Prover, copies, manner).take)


def hand_over(
    copies: Copies, runs: Sequence[ExtentRun], cores: int, again: bool, moved: Callable[[int], None] = unnoticed
) -> None:
    """Read runs into their receivers, each range from the nearest copy that has it sound. Raises `CorruptExtent` if a
    digest does not match.

    Nothing of a damaged extent is kept; everything before it is. Its place, and that of bytes read with it, may then be
    zero. `again`: `prove` has just read them, or other processes read them as well. `moved` gets the bytes of each read, in
    its thread.
    """
    manner = _manner(copies.nearest, runs, cores, again)
    _on_threads(runs, manner, lambda: _Reader(_Giver, copies, manner).take, moved)


def _jobs(runs: Sequence[ExtentRun], manner: Manner) -> deque[Job]:
    """Group extents of a file that are no further apart than a gap, so that small ones cost one read.

    A large run that can be read in place has its own jobs of up to `straight_bytes`, if a chunk has room for one of its
    extents.
    """
    bytes_max, gap_bytes = manner.chunk_bytes, manner.gap_bytes
    jobs: deque[Job] = deque()
    job: list[ReadPart] = []
    for run in runs:
        alone = run.octets is not None and len(run.octets) >= bytes_max
        long = alone and run.entry.extents[run.first].length <= bytes_max
        for part in _parts(run, manner.straight_bytes if long else bytes_max):
            follows = job and not alone and job[-1].run.entry.file == run.entry.file
            follows = follows and 0 <= part.start - job[-1].stop <= gap_bytes
            if follows and part.stop - job[0].start <= bytes_max:
                job.append(part)
            else:
                job = [part]
                jobs.append(job)
        if alone:
            job = []
    return jobs


def _parts(run: ExtentRun, bytes_max: int) -> Iterator[ReadPart]:
    """A run's extents, as many together as `bytes_max` allows; at least one."""
    extents, base = run.entry.extents, run.entry.start
    first, offset = run.first, run.offset
    if run.stop == first + 1:
        yield ReadPart(run, extents[first : run.stop], base + offset, base + offset + extents[first].length)
        return
    end = offset
    for index in range(run.first, run.stop):
        reach = end + extents[index].length
        if reach - offset > bytes_max and index > first:
            yield ReadPart(run, extents[first:index], base + offset, base + end)
            first, offset = index, end
        end = reach
    yield ReadPart(run, extents[first : run.stop], base + offset, base + end)


def _on_threads(
    runs: Sequence[ExtentRun],
    manner: Manner,
    worker: Callable[[], Callable[[Job], None]],
    moved: Callable[[int], None] = unnoticed,
) -> None:
    """Run all jobs, each thread with its own worker; the first error stops them and is raised."""
    jobs = _jobs(runs, manner)
    if not jobs:
        return
    largest = max(max(job[-1].stop - job[0].start for job in jobs), manner.chunk_bytes)
    count = min(manner.readers, max(manner.buffers_bytes_max // largest, 1), len(jobs))

    def drain() -> None:
        act = worker()
        try:
            while True:
                try:
                    job = jobs.popleft()
                except IndexError:
                    return
                act(job)
                moved(sum(part.stop - part.start for part in job))
        except BaseException:
            jobs.clear()
            raise

    if count == 1:
        drain()
        return
    with ThreadPoolExecutor(count, "holdfast-read") as threads:
        running = [threads.submit(drain) for _ in range(count)]
        try:
            for finished in running:
                finished.result()
        finally:
            jobs.clear()


def _manner(source: Source, runs: Sequence[ExtentRun], cores: int, again: bool) -> Manner:
    """The fastest way to read these runs. Runs read `again`, here or by others, go through the page cache."""
    waiting = [_waits(source, file, start) for file, start in _places(runs)]
    limits = (_gap_read_along(source, runs), source.buffers_bytes_max)
    if not any(waiting):
        return Manner(cores, source.chunk_bytes, None, native_copy.can_verify(), *limits)
    past_cache = source.past_cache() if not again and 2 * sum(waiting) > len(waiting) else None
    if past_cache is not None:
        return Manner(READERS_WAITING, max(source.chunk_bytes, DIRECT_CHUNK_BYTES), past_cache, False, *limits)
    return Manner(READERS_WAITING, max(source.chunk_bytes, WAITING_CHUNK_BYTES), None, False, *limits)


def _waits(source: Source, file: str, start: int) -> bool:
    try:
        return source.waits(file, start)
    except CheckpointError:  # reading it says so, or takes it from another copy
        return True


def _gap_read_along(source: Source, runs: Sequence[ExtentRun]) -> int:
    """The largest gap between runs that is read along. All such gaps together are at most `GAPS_SHARE` of what is wanted, or
    as much as the source reads along at once.
    """
    if not source.gap_bytes:
        return 0
    stops = ((run.entry.file, run.entry.start + run.offset + run.length) for run in runs)
    starts = ((run.entry.file, run.entry.start + run.offset) for run in runs[1:])
    between = (start - stop for (before, stop), (file, start) in zip(stops, starts, strict=False) if before == file)
    room = max(source.gap_bytes, int(sum(run.length for run in runs) * GAPS_SHARE))
    largest = 0
    for gap, alike in groupby(sorted(gap for gap in between if 0 < gap < source.gap_bytes)):
        room -= gap * len(list(alike))
        if room < 0:
            break
        largest = gap
    return largest


def _adjacent(job: Job, gap_bytes: int) -> Iterator[Job]:
    """The parts of a job between its gaps, if it may have any."""
    begin = 0
    if not gap_bytes:
        yield job
        return
    for at in range(1, len(job)):
        if job[at].start != job[at - 1].stop:
            yield job[begin:at]
            begin = at
    yield job[begin:]


def _places(runs: Sequence[ExtentRun]) -> Iterator[tuple[str, int]]:
    step = max(sum(run.stop - run.first for run in runs) // PROBES, 1)
    at = 0
    for run in runs:
        for index in range(run.first + -at % step, run.stop, step):
            yield run.entry.file, run.entry.start + run.entry.extents[index].offset
        at += run.stop - run.first


class _Reader:
    """The jobs of one thread: each is done from the nearest copy that has its bytes sound. Others are read in the same
    jobs, but not past the page cache.
    """

    def __init__(self, kind: type[_Prover] | type[_Giver], copies: Copies, manner: Manner) -> None:
        self._kind, self._copies = kind, copies
        self._nearest = kind(copies.nearest, manner)
        self._elsewhere = manner._replace(past_cache=None, straight=False)
        self._others: dict[int, _Prover | _Giver] = {}  # by the identity of their source

    def take(self, job: Job) -> None:
        if self._copies.alone:
            self._nearest.take(job)
        else:
            size = sum(map(_size, job)) if self._kind is _Giver else 0
            self._copies.read(lambda source: self._of(source).take(job), size)

    def _of(self, source: Source) -> _Prover | _Giver:
        if source is self._copies.nearest:
            return self._nearest
        if id(source) not in self._others:
            self._others[id(source)] = self._kind(source, self._elsewhere)
        return self._others[id(source)]


def _size(part: ReadPart) -> int:
    return sum(extent.length for extent in part.extents)


class _Reading:
    def __init__(self, source: Source, manner: Manner) -> None:
        self._source, self._manner = source, manner
        self._memory = memoryview(b"")

    def all(self, file: str, start: int, size: int) -> memoryview:
        """Bytes of a file, as a view or read; fewer only at its end; valid until the next call."""
        view = self._source.view(file, start, start + size)
        return self.read(file, start, size) if view is None else view

    def read(self, file: str, start: int, size: int) -> memoryview:
        """The same for bytes without a view in the source."""
        room = max(size, self._manner.chunk_bytes)
        if self._manner.past_cache is not None:
            if len(self._memory) < room + 2 * direct.ALIGNMENT:
                self._memory = direct.memory_for(room)
            reader = self._manner.past_cache(file, start, size, self._memory)
            if reader is not None:
                return reader
        elif len(self._memory) < room:
            self._memory = np.empty(room, np.uint8).data
        buffer = self._memory[:size]
        return buffer[: self._source.read_into(file, start, buffer)]

    def check(self, piece: Piece, into: memoryview | None = None) -> None:
        """Read a piece in parts that stay in the cache, into a buffer or in place, and check it."""
        running, held, step = digest.running(), 0, self._manner.chunk_bytes
        for at in range(0, piece.length, step):
            size = min(step, piece.length - at)
            if into is None:
                part = self.all(piece.file, piece.start + at, size)
            else:
                part = into[at : at + size]
                part = part[: self._source.read_into(piece.file, piece.start + at, part)]
            running.update(part)
            held += len(part)
            if len(part) < size:
                break
        verification.check_found(piece, held, running.hexdigest())


class _Prover:
    def __init__(self, source: Source, manner: Manner) -> None:
        self._reading = _Reading(source, manner)
        self._chunk_bytes, self._gap_bytes = manner.chunk_bytes, manner.gap_bytes

    def take(self, job: Job) -> None:
        first, start, stop = job[0], job[0].start, job[-1].stop
        if stop - start > self._chunk_bytes and len(job) == len(first.extents) == 1:
            self._reading.check(_piece(first, first.extents[0]))
            return
        data = self._reading.all(first.run.entry.file, start, stop - start)
        for parts in _adjacent(job, self._gap_bytes):
            mine = data[parts[0].start - start : parts[-1].stop - start]
            if native_copy.can_verify() and _extents(parts, proven_only=True).take(mine):
                continue
            for part in parts:
                _check(part, data[part.start - start : part.stop - start])


class _Giver:
    def __init__(self, source: Source, manner: Manner) -> None:
        self._source, self._manner = source, manner
        self._reading = _Reading(source, manner)

    def take(self, job: Job) -> None:
        first, start, stop = job[0], job[0].start, job[-1].stop
        data = self._source.view(first.run.entry.file, start, stop)
        if data is None:
            if len(job) == 1 and first.run.octets is not None and self._manner.past_cache is None:
                self._straight(first, first.run.octets)
                return
            data = self._reading.read(first.run.entry.file, start, stop - start)
        for parts in _adjacent(job, self._manner.gap_bytes):
            self._give(parts, data[parts[0].start - start : parts[-1].stop - start])

    def _give(self, parts: Job, data: memoryview) -> None:
        """Check the bytes of parts that follow each other, and hand them over."""
        taken, start = native_copy.can_verify() and _extents(parts).take(data), parts[0].start
        for part in parts:
            mine = data[part.start - start : part.stop - start]
            if not taken:
                _check(part, mine, part.run.octets)
            if part.run.octets is None:
                for receiver in part.run.receivers:
                    receiver.take(part.extents[0].offset, mine)

    def _straight(self, part: ReadPart, octets: memoryview) -> None:
        """Read into place, and check there; if anything is wrong, nothing of it stays (I7)."""
        at = part.extents[0].offset - part.run.offset
        into = octets[at : at + part.stop - part.start]
        try:
            file = self._source.file(part.run.entry.file) if self._manner.straight else None
            cached = max(extent.length for extent in part.extents) <= self._manner.chunk_bytes  # by a core, once it is read
            if file is not None and cached and _extents([part]).take_from(file, part.start):
                return
            if len(part.extents) == 1:
                self._reading.check(_piece(part, part.extents[0]), into)
            else:
                _check(part, into[: self._source.read_into(part.run.entry.file, part.start, into)])
        except BaseException:
            np.frombuffer(into, np.uint8)[:] = 0
            raise


def _check(part: ReadPart, data: memoryview, octets: memoryview | None = None) -> None:
    """Check a part's extents; if the run has `octets`, copy verified ones there.

    Raises `CorruptExtent`, also if `data` is shorter than the part.
    """
    base = part.extents[0].offset
    shift = base - part.run.offset
    copied = 0
    for extent in part.extents:
        at = extent.offset - base
        end = at + extent.length
        mine = data[at:end]
        if digest.digest(mine) != extent.digest or len(mine) != extent.length:
            verification.check(_piece(part, extent), mine)
        if octets is not None and end - copied >= COPIED_BYTES_MIN:
            copy(octets[shift + copied : shift + end], data[copied:end])
            copied = end
    if octets is not None and copied < end:
        copy(octets[shift + copied : shift + end], data[copied:end])


def _extents(job: Job, proven_only: bool = False) -> native_copy.Extents:
    """A job's extents, and the targets of contiguous ones; with `proven_only` without targets."""
    extents = native_copy.Extents()
    for part in job:
        octets = None if proven_only else part.run.octets
        if octets is not None:
            at = part.extents[0].offset - part.run.offset
            octets = octets[at : at + part.stop - part.start]
        extents.add(part.extents, octets)
    return extents


def _piece(part: ReadPart, extent: Extent) -> Piece:
    return verification.tensor_piece(part.run.group, part.run.name, part.run.entry, extent)
