"""Shards as streams: window by window from verified extents, a few windows ahead of the socket, in bounded memory (I7)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import transfer
from holdfast_formats.disk import read_planner, verification
from holdfast_formats.disk.coded import IN_NO_FILE
from holdfast_formats.disk.manifests import TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.files import Files
from holdfast_formats.layout import parts, shard_file
from holdfast_formats.layout.shard_file import ShardFile, Strip
from holdfast_formats.region import Box, Shape, byte_span, byte_view
from holdfast_formats.transfer import Direction, Elements
from holdfast_service.api.access.admission import ConcurrencyLimit
from holdfast_service.api.content.delivery import parts_of
from holdfast_service.api.content.extent_cache import CachedCheckpoint, Octets, ProvenExtents

WINDOW_BYTES = 2**21
AHEAD = 2  # windows that are put together while one is sent
STREAMS_MAX = 16  # of 3 windows and what the server holds: 128 MiB in all, and the extents' slabs
STREAM_WAIT_MAX_S = 30.0
THREADS_MAX = 4


class Recipe(NamedTuple):
    """A shard's file and its sources: a checkpoint, and the stored tensors of one of its groups. `decode` computes boxes of
    coded tensors.
    """

    file: ShardFile
    source: CachedCheckpoint
    group: str
    entries: Mapping[str, TensorEntry]
    decode: Callable[[str, Box], NDArray[Any]]


class StripPlace(NamedTuple):
    """The target of a box of a stored tensor of `shape`: `held` has the box's shape, in units of the strip.

    If its bytes [start, stop) of the tensor are contiguous in the window too, the first one is at `at`.
    """

    held: Elements
    box: Box
    shape: Shape
    start: int
    stop: int
    at: int

    def straight(self, piece: Piece) -> int | None:
        """The piece's offset in the window, if it is contiguous there; None if it has to be cut or scattered."""
        inside = self.start <= piece.offset and piece.offset + piece.length <= self.stop
        return self.at + piece.offset - self.start if inside else None


class ShardStreams:
    """The bodies of all shards being sent."""

    def __init__(self, tier: Files, streams_max: int = STREAMS_MAX) -> None:
        self.extents = ProvenExtents(tier)
        self._threads = ThreadPoolExecutor(THREADS_MAX, "holdfast-shard")
        self._limit = ConcurrencyLimit(lambda: streams_max)

    async def body(self, recipe: Recipe, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Bytes [start, stop) of a shard's file, window by window.

        The first one comes after the first window was verified. Raises `Damaged` and `StorageFailed`, and `DeadlineExceeded`
        if too many others are being sent.
        """
        header = recipe.file.header
        todo = shard_file.windows(recipe.file, start, stop, WINDOW_BYTES)
        ahead: deque[tuple[tuple[int, int], asyncio.Future[Octets]]] = deque()
        spare: list[Octets] = []  # windows that were sent
        loop = asyncio.get_running_loop()

        def begin() -> None:
            span = next(todo, None)
            if span is not None:
                memory = spare.pop() if spare else np.empty(WINDOW_BYTES, np.uint8)
                filling = loop.run_in_executor(self._threads, self._fill, recipe, span, memory)
                filling.add_done_callback(_heard)
                ahead.append((span, filling))

        full = (
            f"{STREAMS_MAX} shard downloads are running, or too many for this token or address, and "
            f"none of them ended within {STREAM_WAIT_MAX_S:.0f} s"
        )
        hint = "try again later, or send Accept: application/json to get a plan to read the shard from storage"
        async with self._limit.awaited(STREAM_WAIT_MAX_S, full, hint):
            with self.extents.opened(), _cancelled(ahead):
                for _ in range(AHEAD):
                    begin()
                if start < len(header):
                    if ahead:
                        await ahead[0][1]
                    for part in parts_of(memoryview(header)[start:stop]):
                        yield part
                while ahead:
                    (low, high), filling = ahead.popleft()
                    window = await filling
                    begin()
                    for part in parts_of(window.data[max(start - low, 0) : min(stop, high) - low]):
                        yield part
                    spare.append(window)

    def _fill(self, recipe: Recipe, span: tuple[int, int], memory: Octets) -> Octets:
        """Fill one window, in a thread, which releases its slabs itself if the stream has ended.

        Returns all of `memory`; the window is the beginning of it.
        """
        low, high = span
        window = memory[: high - low]
        wanted: dict[Piece, list[StripPlace]] = {}
        missing = sum(_place(recipe, strip, window, wanted) for strip in shard_file.strips(recipe.file, low, high))
        straight = {piece: places[0].straight(piece) for piece, places in wanted.items() if len(places) == 1}
        as_stored = [(piece, at) for piece, at in straight.items() if at is not None]
        for following, at in _runs(as_stored):
            length = following[-1].stop - following[0].start
            self.extents.read(recipe.source, following, window[at : at + length])
            missing -= length
        with self.extents.opened():
            scattered = [piece for piece in wanted if straight.get(piece) is None]
            for run, data in self.extents.lend(recipe.source, scattered):
                missing -= _scatter(run, data, wanted)
        assert missing == 0, f"{missing} bytes of window [{low}, {high}) were not found"
        return memory


@contextmanager
def _cancelled(ahead: Iterable[tuple[object, asyncio.Future[Octets]]]) -> Iterator[None]:
    """At the end of the block what is still being read is cancelled."""
    try:
        yield
    finally:
        for _, filling in ahead:
            filling.cancel()


def _place(recipe: Recipe, strip: Strip, window: Octets, wanted: dict[Piece, list[StripPlace]]) -> int:
    """Record the targets of a strip under each extent; zero the padding, and decode coded boxes. Returns how many bytes are
    still to be filled.
    """
    memory = window[strip.at : strip.stop].view(transfer.element_dtype(strip.itemsize))
    if strip.is_padded:
        memory[:] = 0
    missing = 0
    for part in strip.parts:
        entry = recipe.entries[part.tensor]
        if entry.file == IN_NO_FILE:
            parts.view(memory, part)[...] = recipe.decode(part.tensor, part.box).view(memory.dtype)
            continue
        missing += part.box.volume * strip.itemsize
        view = byte_view(entry.dtype, entry.shape)
        start, stop = byte_span(part.box, view.shape, strip.itemsize)
        together = stop - start == (part.stop - part.start) * strip.itemsize == part.box.volume * strip.itemsize
        together = together and not part.turned
        place = StripPlace(parts.view(memory, part), part.box, view.shape, 0, 0, 0)
        if together:
            place = place._replace(start=start, stop=stop, at=strip.at + part.start * strip.itemsize)
        for first, last in read_planner.extents_of(entry.extents, part.box, view):
            for extent in entry.extents[first:last]:
                wanted.setdefault(verification.tensor_piece(recipe.group, part.tensor, entry, extent), []).append(place)
    return missing


def _runs(listed: Iterable[tuple[Piece, int]]) -> Iterator[tuple[list[Piece], int]]:
    """Pieces that are consecutive both in a file and in the window, and where in the window they begin."""
    run: list[Piece] = []
    begin = 0
    for piece, at in sorted(listed, key=lambda one: (one[0].file, one[0].start)):
        follows = run and piece.file == run[0].file and piece.start == run[-1].stop
        if run and not (follows and at - begin == piece.start - run[0].start):
            yield run, begin
            run = []
        if not run:
            begin = at
        run.append(piece)
    if run:
        yield run, begin


def _scatter(run: Sequence[Piece], data: Octets, wanted: Mapping[Piece, list[StripPlace]]) -> int:
    """Copy the window's parts of consecutive pieces; returns how many bytes.

    Bytes of one tensor with the same targets are moved at once.
    """
    moved = first = 0
    for last in range(1, len(run) + 1):
        if last < len(run) and run[last].tensor == run[first].tensor and _same(wanted[run[last]], wanted[run[first]]):
            continue
        octets = data[run[first].start - run[0].start : run[last - 1].stop - run[0].start]
        for place in wanted[run[first]]:
            itemsize = place.held.dtype.itemsize
            units, offset = octets.view(place.held.dtype), run[first].offset // itemsize
            moved += itemsize * transfer.move(Direction.SCATTER, units, offset, place.held, place.box, place.shape)
        first = last
    return moved


def _same(places: Sequence[StripPlace], others: Sequence[StripPlace]) -> bool:
    return len(places) == len(others) and all(a is b for a, b in zip(places, others, strict=True))


def _heard(filling: asyncio.Future[Octets]) -> None:
    """Retrieve the exception of an abandoned window, so that asyncio does not log it."""
    if not filling.cancelled():
        filling.exception()
